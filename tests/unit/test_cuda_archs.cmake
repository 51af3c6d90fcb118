# Run by cmake -P: names of GPU architectures, in every way a caller may write them.
include(${CMAKE_CURRENT_LIST_DIR}/../../cmake/cuda_archs.cmake)

function(expect wanted nvcc_version detected expected)
  fkda_resolve_cuda_archs("${wanted}" ${nvcc_version} "${detected}" names flags)
  if(NOT names STREQUAL expected)
    message(SEND_ERROR "'${wanted}' (nvcc ${nvcc_version}, GPUs '${detected}'): '${names}', "
                       "expected '${expected}'")
  endif()
endfunction()

set(all_13 "80+ptx;86;89;90a;100a;103a;120a;121a")
expect(all 13.0.88 "" "${all_13}")
expect(all 12.9.41 "" "${all_13}")
expect(all 12.8.0 "" "80+ptx;86;89;90a;100a;120a")
expect(all 12.4.1 "" "80+ptx;86;89;90a")
expect(ALL 13.0.88 "9.0" "${all_13}")
expect(auto 13.0.88 "" "${all_13}")
expect(auto 13.0.88 "9.0" 90a)
expect(auto 13.0.88 "8.6" 86)
expect(Auto 13.0.88 "10.3;8.9" "103a;89")
expect("90a" 13.0.88 "" 90a)
expect("80;90a;100a" 13.0.88 "" "80;90a;100a")
expect("80,90a, 100a" 13.0.88 "" "80;90a;100a")
expect("9.0a 12.0a 8.0" 13.0.88 "" "90a;120a;80")
expect("sm_90a;sm_90A;90a" 13.0.88 "" 90a)
expect("100f;80+ptx" 13.0.88 "" "100f;80+ptx")

fkda_resolve_cuda_archs("80+ptx;90a" 13.0.88 "" names flags)
set(expected_flags "SHELL:-gencode arch=compute_80,code=sm_80"
                   "SHELL:-gencode arch=compute_80,code=compute_80"
                   "SHELL:-gencode arch=compute_90a,code=sm_90a")
if(NOT flags STREQUAL expected_flags)
  message(SEND_ERROR "flags '${flags}', expected '${expected_flags}'")
endif()

# What is refused, by a process of its own since a refusal ends it.
if(NOT DEFINED WANTED)
  foreach(wanted hopper 75 sm_ 90b "80;everything" "9..0" " ")
    execute_process(
      COMMAND ${CMAKE_COMMAND} "-DWANTED=${wanted}" -P ${CMAKE_CURRENT_LIST_FILE}
      RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE error)
    if(status EQUAL 0 OR NOT error MATCHES "FLASH_KDA_CUDA_ARCHS: '")
      message(SEND_ERROR "'${wanted}' was not refused by name: ${error}")
    endif()
  endforeach()
else()
  fkda_resolve_cuda_archs("${WANTED}" 13.0.88 "" names flags)
endif()
