# The C face, from C11: what a stranger sees is the public header and the library, shared or static.
enable_language(C)
find_package(Threads REQUIRED)

add_library(c_user INTERFACE)
target_compile_features(c_user INTERFACE c_std_11)
target_compile_options(c_user INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wstrict-prototypes -Werror ${outside_flags})
target_link_options(c_user INTERFACE ${outside_flags})
target_link_libraries(c_user INTERFACE Threads::Threads)
set(CMAKE_C_EXTENSIONS OFF)

add_executable(example_attend_c ${PROJECT_SOURCE_DIR}/examples/attend.c)
target_link_libraries(example_attend_c PRIVATE tercet::tercet c_user)
add_test(NAME example.attend_c COMMAND example_attend_c)

add_executable(c_test c_test.c)
target_link_libraries(c_test PRIVATE tercet::tercet c_user)
add_executable(c_static_test c_test.c)
target_link_libraries(c_static_test PRIVATE $<LINK_ONLY:tercet_internal> c_user)
target_include_directories(c_static_test PRIVATE ${PROJECT_SOURCE_DIR}/include)
foreach(test c c_static)
  target_compile_definitions(${test}_test PRIVATE _POSIX_C_SOURCE=200809L TERCET_TEST_VERSION="${PROJECT_VERSION}")
  add_test(NAME ${test} COMMAND ${test}_test)
endforeach()

# The header alone, as C11 and as the oldest C++ that has its integers.
foreach(language c cc)
  file(CONFIGURE OUTPUT header_alone.${language} CONTENT "#include \"tercet/tercet.h\"\n")
  add_library(header_alone_${language} OBJECT ${CMAKE_CURRENT_BINARY_DIR}/header_alone.${language})
  target_include_directories(header_alone_${language} PRIVATE ${PROJECT_SOURCE_DIR}/include)
  target_compile_options(header_alone_${language} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror)
endforeach()
set_target_properties(header_alone_c PROPERTIES C_STANDARD 11)
set_target_properties(header_alone_cc PROPERTIES CXX_STANDARD 11)

# Against the C++ face.
add_executable(attend_c_test attend_c_test.cc)
target_link_libraries(attend_c_test PRIVATE tercet_internal tercet_proof GTest::gtest_main)
gtest_discover_tests(attend_c_test TEST_PREFIX attend_c.)
