# What an installation holds: the library, its headers, the command, the licence, and how CMake and pkg-config find them.
# Everything is found relative to itself, so that an installed tree may be moved.

# Hidden visibility leaves std:: templates visible, as libstdc++ marks them so; the linker keeps them in.
if(BUILD_SHARED_LIBS AND UNIX AND NOT APPLE)
  target_link_options(tercet PRIVATE LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/exports.map)
  set_property(TARGET tercet APPEND PROPERTY LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/exports.map)
endif()

# A static library leaves Highway and oneTBB to whoever links it, and to C's linker, which has none, the C++ runtime.
set(pkgconfig_requires "")
set(pkgconfig_runtime "")
if(NOT BUILD_SHARED_LIBS)
  set(pkgconfig_requires "libhwy, tbb")
  set(runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
  list(FILTER runtime INCLUDE REGEX "^(stdc\\+\\+|c\\+\\+|c\\+\\+abi|m)$")
  list(REMOVE_DUPLICATES runtime)
  target_link_libraries(tercet INTERFACE $<INSTALL_INTERFACE:$<$<LINK_LANGUAGE:C>:${runtime}>>)
  list(TRANSFORM runtime PREPEND " -l")
  list(JOIN runtime "" pkgconfig_runtime)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tercet)
install(TARGETS tercet EXPORT tercetTargets)
install(EXPORT tercetTargets NAMESPACE tercet:: DESTINATION ${package_dir})
configure_package_config_file(cmake/tercetConfig.cmake.in ${PROJECT_BINARY_DIR}/tercetConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tercetConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tercetConfig.cmake ${PROJECT_BINARY_DIR}/tercetConfigVersion.cmake DESTINATION ${package_dir})

file(RELATIVE_PATH include_from_pkgconfig ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_FULL_INCLUDEDIR})
configure_file(cmake/tercet.pc.in ${PROJECT_BINARY_DIR}/tercet.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tercet.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES include/tercet/tercet.hpp include/tercet/tercet.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tercet)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TERCET_BUILD_CLI)
  install(TARGETS tercet_cli)
endif()
