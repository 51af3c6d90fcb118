# Which GPU architectures to compile for.
#
#     FLASH_KDA_CUDA_ARCHS = auto    the GPU that is visible, or all where none is
#                            all     every one below that the compiler knows, and PTX for later ones
#                            90a     or a list: 80;90a or 80,90a. Also 9.0a, sm_90a, and 80+ptx:
#                                    machine code, and PTX that the driver compiles for later ones
#
# fkda_resolve_cuda_archs(WANTED NVCC_VERSION DETECTED names flags): sets `names` to a list and
# `flags` to nvcc's options. DETECTED: compute capabilities of visible GPUs, "9.0;8.6"; may be empty.
set(fkda_all_cuda_archs 80 86 89 90a 100a 103a 120a 121a)

# The first nvcc that compiles for each; older ones skip it in `all`.
set(fkda_cuda_arch_since_89 11.8)
set(fkda_cuda_arch_since_90a 12.0)
set(fkda_cuda_arch_since_100a 12.8)
set(fkda_cuda_arch_since_103a 12.9)
set(fkda_cuda_arch_since_120a 12.8)
set(fkda_cuda_arch_since_121a 12.9)

# "9.0" -> 90a, "8.6" -> 86
function(fkda_arch_of_capability capability result)
  string(REPLACE "." "" arch "${capability}")
  if(arch GREATER_EQUAL 90)
    string(APPEND arch "a")
  endif()
  set(${result} ${arch} PARENT_SCOPE)
endfunction()

function(fkda_resolve_cuda_archs wanted nvcc_version detected names_out flags_out)
  string(TOLOWER "${wanted}" wanted)
  string(REGEX REPLACE "[, ]+" ";" wanted "${wanted}")
  set(names)
  if(wanted STREQUAL "auto" AND detected)
    foreach(capability IN LISTS detected)
      fkda_arch_of_capability(${capability} arch)
      list(APPEND names ${arch})
    endforeach()
  elseif(wanted STREQUAL "auto" OR wanted STREQUAL "all")
    foreach(arch IN LISTS fkda_all_cuda_archs)
      if(NOT nvcc_version VERSION_LESS "${fkda_cuda_arch_since_${arch}}")
        list(APPEND names ${arch})
      endif()
    endforeach()
    list(TRANSFORM names REPLACE "^80$" "80+ptx")
  else()
    foreach(item IN LISTS wanted)
      string(REGEX REPLACE "^sm_" "" arch "${item}")
      string(REGEX REPLACE "^([0-9]+)\\.([0-9])" "\\1\\2" arch "${arch}")
      if(NOT arch MATCHES "^[0-9]+[af]?([+]ptx)?$")
        message(FATAL_ERROR "FLASH_KDA_CUDA_ARCHS: '${item}', wanted auto, all or a list of names "
                            "such as 80;90a;100a")
      endif()
      string(REGEX MATCH "^[0-9]+" number "${arch}")
      if(number LESS 80)
        message(FATAL_ERROR "FLASH_KDA_CUDA_ARCHS: '${item}', wanted 80 or later")
      endif()
      list(APPEND names ${arch})
    endforeach()
  endif()
  list(REMOVE_DUPLICATES names)
  if(NOT names)
    message(FATAL_ERROR "FLASH_KDA_CUDA_ARCHS: '${wanted}', wanted auto, all or a list of names "
                        "such as 80;90a;100a")
  endif()

  set(flags)
  foreach(name IN LISTS names)
    string(REPLACE "+ptx" "" arch "${name}")
    list(APPEND flags "SHELL:-gencode arch=compute_${arch},code=sm_${arch}")
    if(name MATCHES "ptx")
      list(APPEND flags "SHELL:-gencode arch=compute_${arch},code=compute_${arch}")
    endif()
  endforeach()
  set(${names_out} "${names}" PARENT_SCOPE)
  set(${flags_out} "${flags}" PARENT_SCOPE)
endfunction()

# Compute capabilities of the visible GPUs, as nvidia-smi knows them; empty without one.
function(fkda_detect_gpus result)
  set(found)
  find_program(FLASH_KDA_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(FLASH_KDA_NVIDIA_SMI)
  if(FLASH_KDA_NVIDIA_SMI)
    execute_process(COMMAND ${FLASH_KDA_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE status)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${output}")
      list(REMOVE_DUPLICATES found)
    endif()
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()
