# The readers and writers of files.
add_executable(io_test ${CMAKE_CURRENT_LIST_DIR}/io_test.cc)
target_compile_definitions(io_test PRIVATE TERCET_TEST_DATA="${CMAKE_CURRENT_LIST_DIR}/data")
target_link_libraries(io_test PRIVATE tercet_io GTest::gtest_main)
gtest_discover_tests(io_test)
