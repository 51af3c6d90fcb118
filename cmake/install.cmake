# What `cmake --install` lays down: header, both libraries, pkg-config file, CMake package.
#
#     find_package(flash_kda)     ->  flash_kda::shared, flash_kda::static
#     pkg-config flash_kda        ->  -lflashkda    (--static adds what the archive needs)
#
# The two targets are exported apart, so that users of the shared library need no OpenMP.
include(CMakePackageConfigHelpers)

set(fkda_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flash_kda)

install(FILES include/flash_kda.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
foreach(kind shared static)
  install(TARGETS flashkda_${kind} EXPORT flash_kda-${kind}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT library)
  install(EXPORT flash_kda-${kind} NAMESPACE flash_kda:: FILE flash_kda-${kind}.cmake
    DESTINATION ${fkda_package_dir} COMPONENT development)
endforeach()

configure_package_config_file(cmake/flash_kda-config.cmake.in
  ${PROJECT_BINARY_DIR}/flash_kda-config.cmake INSTALL_DESTINATION ${fkda_package_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flash_kda-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flash_kda-config.cmake
              ${PROJECT_BINARY_DIR}/flash_kda-config-version.cmake
  DESTINATION ${fkda_package_dir} COMPONENT development)

# The prefix is found from the place of the file, so that an installed tree may be moved, unless a
# folder was given as an absolute path.
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
  set(fkda_pc_prefix ${CMAKE_INSTALL_PREFIX})
else()
  file(RELATIVE_PATH fkda_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(REGEX REPLACE "/$" "" fkda_pc_prefix "\${pcfiledir}/${fkda_pc_prefix}")
endif()
foreach(folder LIBDIR INCLUDEDIR)
  set(fkda_pc_${folder} ${CMAKE_INSTALL_${folder}})
  if(NOT IS_ABSOLUTE ${CMAKE_INSTALL_${folder}})
    string(PREPEND fkda_pc_${folder} "\${prefix}/")
  endif()
endforeach()
set(fkda_pc_private "-lm")
if(OpenMP_C_FOUND)
  string(APPEND fkda_pc_private " ${OpenMP_C_FLAGS}")
endif()
if(FKDA_HAVE_CUDA)
  get_target_property(fkda_cudart_file CUDA::cudart_static IMPORTED_LOCATION)
  string(APPEND fkda_pc_private " ${fkda_cudart_file} -lrt -lpthread -ldl")
endif()
configure_file(cmake/flash_kda.pc.in ${PROJECT_BINARY_DIR}/flash_kda.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flash_kda.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
