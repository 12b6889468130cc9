#What runs on AMX tiles, here on registers in plain code; and a program that holds the real ones against these, for machines that have them.
add_library(tercet_amx_emulation STATIC amx_emulation.cc) target_link_libraries(tercet_amx_emulation PUBLIC tercet_internal)
    target_link_libraries(conformance_test PRIVATE tercet_amx_emulation) add_executable(amx_test amx_test.cc)
        target_link_libraries(amx_test PRIVATE tercet_amx_emulation tercet_internal tercet_proof GTest::gtest_main)
            gtest_discover_tests(amx_test TEST_PREFIX amx.)

                if (CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64" AND NOT TERCET_SANITIZE)
                    add_executable(amx_selftest amx_selftest.cc)
                        foreach (source contract / layer.cc contract / tensor.cc rules / rules.cc proof / inputs.cc)
                            target_sources(amx_selftest PRIVATE ${PROJECT_SOURCE_DIR} / src / ${source}) endforeach()
                                target_link_libraries(amx_selftest PRIVATE tercet_settings) target_link_options(amx_selftest PRIVATE - static)
                                    add_test(NAME amx.selftest COMMAND amx_selftest) set_tests_properties(amx.selftest PROPERTIES SKIP_RETURN_CODE 77)
                                        endif()
