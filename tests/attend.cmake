# The layer itself: refusals, laws, and the conformance grid, a ctest test a rule so that they share the cores.
foreach(test contract laws)
  add_executable(${test}_test ${test}_test.cc)
  target_link_libraries(${test}_test PRIVATE tercet_internal tercet_proof GTest::gtest_main)
  gtest_discover_tests(${test}_test TEST_PREFIX ${test}.)
endforeach()

add_executable(conformance_test conformance_test.cc)
target_link_libraries(conformance_test PRIVATE tercet_internal tercet_proof GTest::gtest)
foreach(rule linear retention simple_gla gla rwkv6 delta gated_delta kda rwkv7)
  add_test(NAME conformance.${rule} COMMAND conformance_test --gtest_brief=1 --gtest_filter=${rule}.*)
endforeach()
