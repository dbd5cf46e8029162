# FlashInfer's FP8 prefill kernel for sm_90a, from the headers that scripts/get_flashinfer.sh takes out of its wheel: an option, off
# by default. Sets BATON_FLASHINFER_INCLUDES.

option(BATON_FLASHINFER "Build FlashInfer's FP8 prefill attention for sm_90a in (scripts/get_flashinfer.sh)." OFF)
set(BATON_FLASHINFER_ROOT "${PROJECT_SOURCE_DIR}/.deps/flashinfer" CACHE PATH "Headers of FlashInfer, CUTLASS and CCCL.")

if(BATON_FLASHINFER)
  if(NOT BATON_WITH_CUDA)
    message(FATAL_ERROR "BATON_FLASHINFER=ON needs the CUDA backend (BATON_CUDA=ON, no sanitizers)")
  endif()
  if(NOT EXISTS "${BATON_FLASHINFER_ROOT}/VERSION")
    message(FATAL_ERROR "BATON_FLASHINFER=ON: no ${BATON_FLASHINFER_ROOT}; scripts/get_flashinfer.sh takes the headers out of its wheel")
  endif()
  file(STRINGS "${BATON_FLASHINFER_ROOT}/VERSION" BATON_FLASHINFER_VERSION)
  # CCCL first: that of the toolkit is older than what FlashInfer asks for.
  set(BATON_FLASHINFER_INCLUDES ${BATON_FLASHINFER_ROOT}/cccl/libcudacxx ${BATON_FLASHINFER_ROOT}/cccl/cub
    ${BATON_FLASHINFER_ROOT}/cccl/thrust ${BATON_FLASHINFER_ROOT}/include ${BATON_FLASHINFER_ROOT}/cutlass)
  message(STATUS "CUDA backend: with FlashInfer ${BATON_FLASHINFER_VERSION} from ${BATON_FLASHINFER_ROOT}")
endif()
