# The readers and writers of files, and their fuzzers replayed over the corpora.
add_executable(io_test ${CMAKE_CURRENT_LIST_DIR}/io_test.cc)
target_compile_definitions(io_test PRIVATE TERCET_TEST_DATA="${CMAKE_CURRENT_LIST_DIR}/data")
target_link_libraries(io_test PRIVATE tercet_io GTest::gtest_main)
gtest_discover_tests(io_test)

foreach(format safetensors npy npz)
  add_executable(fuzz_replay_${format} ${CMAKE_CURRENT_LIST_DIR}/fuzz/fuzz_${format}.cc ${CMAKE_CURRENT_LIST_DIR}/fuzz/replay.cc)
  target_link_libraries(fuzz_replay_${format} PRIVATE tercet_io)
  add_test(NAME fuzz_replay_${format} COMMAND fuzz_replay_${format} ${CMAKE_CURRENT_LIST_DIR}/fuzz/corpus/${format})
endforeach()
