# Python's tests, a file each, on the extension in the build folder. A file whose every test needs a package that is not there is skipped (pytest's 5).
file(GLOB files RELATIVE ${CMAKE_CURRENT_LIST_DIR}/python CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/python/test_*.py)
foreach(file ${files})
  string(REGEX REPLACE "^test_(.*)\\.py$" "\\1" name ${file})
  add_test(NAME python.${name} COMMAND ${Python_EXECUTABLE} -B -m pytest -q -p no:cacheprovider ${CMAKE_CURRENT_LIST_DIR}/python/${file})
  set_tests_properties(python.${name} PROPERTIES ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python;PYTHONDONTWRITEBYTECODE=1" SKIP_RETURN_CODE 5 TIMEOUT 600)
endforeach()
