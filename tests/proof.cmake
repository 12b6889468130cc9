# The reference forms.
add_executable(reference_test ${CMAKE_CURRENT_LIST_DIR}/reference_test.cc)
target_compile_definitions(reference_test PRIVATE TERCET_TEST_DATA="${CMAKE_CURRENT_LIST_DIR}/data")
target_link_libraries(reference_test PRIVATE tercet_io GTest::gtest_main)
gtest_discover_tests(reference_test)
