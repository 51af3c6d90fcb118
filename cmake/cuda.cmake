# FLASH_KDA_CUDA: are there CUDA kernels in the library? Sets FKDA_HAVE_CUDA and enables the language.
#
# Both options take their first value from the environment variable of the same name, which is how
# `pip install` passes them.
include(cmake/cuda_archs.cmake)

function(fkda_option_from_environment name default documentation)
  set(value "${default}")
  if(DEFINED ENV{${name}} AND NOT "$ENV{${name}}" STREQUAL "")
    set(value "$ENV{${name}}")
  endif()
  set(${name} "${value}" CACHE STRING "${documentation}")
endfunction()

fkda_option_from_environment(FLASH_KDA_CUDA AUTO
  "CUDA kernels: ON, OFF, or AUTO (when a CUDA compiler is found)")
fkda_option_from_environment(FLASH_KDA_CUDA_ARCHS auto
  "GPU architectures: auto, all or a list such as 80;90a;100a")
set_property(CACHE FLASH_KDA_CUDA PROPERTY STRINGS AUTO ON OFF)

set(FKDA_HAVE_CUDA FALSE)
string(TOUPPER "${FLASH_KDA_CUDA}" fkda_cuda_wanted)
if(fkda_cuda_wanted STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(FKDA_HAVE_CUDA TRUE)
  endif()
elseif(FLASH_KDA_CUDA)
  set(FKDA_HAVE_CUDA TRUE)
endif()

if(FKDA_HAVE_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES OFF) # CMake 3.25 does not know all names: -gencode is passed instead
  enable_language(CUDA)
  find_package(CUDAToolkit 12.4 REQUIRED)
  fkda_detect_gpus(fkda_gpus)
  fkda_resolve_cuda_archs("${FLASH_KDA_CUDA_ARCHS}" "${CMAKE_CUDA_COMPILER_VERSION}" "${fkda_gpus}"
    FKDA_CUDA_ARCHS FKDA_CUDA_ARCH_FLAGS)
  set(FKDA_CUDA_HAVE_SM90 FALSE) # the kernels of path sm90 (src/cuda/cuda_paths.h)
  if(FKDA_CUDA_ARCHS MATCHES "(^|;)90a")
    set(FKDA_CUDA_HAVE_SM90 TRUE)
  endif()
  message(STATUS "CUDA kernels for: ${FKDA_CUDA_ARCHS} (nvcc ${CMAKE_CUDA_COMPILER_VERSION})")
else()
  message(STATUS "CUDA kernels: none (FLASH_KDA_CUDA=${FLASH_KDA_CUDA})")
endif()
