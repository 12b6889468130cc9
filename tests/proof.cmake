# The reference forms, their gradients, and the proof that rests on them.
add_executable(reference_test ${CMAKE_CURRENT_LIST_DIR}/reference_test.cc)
target_compile_definitions(reference_test PRIVATE TERCET_TEST_DATA="${CMAKE_CURRENT_LIST_DIR}/data")
target_link_libraries(reference_test PRIVATE tercet_io GTest::gtest_main)
gtest_discover_tests(reference_test)

add_executable(gradient_reference_test ${CMAKE_CURRENT_LIST_DIR}/gradient_reference_test.cc)
target_link_libraries(gradient_reference_test PRIVATE tercet_proof GTest::gtest_main)
gtest_discover_tests(gradient_reference_test)

add_executable(proof_test ${CMAKE_CURRENT_LIST_DIR}/proof_test.cc)
target_link_libraries(proof_test PRIVATE tercet_proof GTest::gtest_main)
gtest_discover_tests(proof_test)

add_executable(proof_gradient_test ${CMAKE_CURRENT_LIST_DIR}/proof_gradient_test.cc)
target_link_libraries(proof_gradient_test PRIVATE tercet_proof GTest::gtest_main)
gtest_discover_tests(proof_gradient_test)

# The sweep of docs/proof.md, by hand.
add_executable(proof_sweep EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/proof_sweep.cc)
target_link_libraries(proof_sweep PRIVATE tercet_amx_emulation tercet_proof)
