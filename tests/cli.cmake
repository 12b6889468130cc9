# The command, run as a stranger runs it.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME cli COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/cli_test.py)
set_tests_properties(cli PROPERTIES ENVIRONMENT "TERCET_BIN=$<TARGET_FILE:tercet_cli>" TIMEOUT 900)
