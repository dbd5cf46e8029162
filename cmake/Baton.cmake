# What every folder's CMakeLists.txt uses: one library per room, one test binary per room.

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(prometheus-cpp REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)

add_library(baton_options INTERFACE)
target_compile_features(baton_options INTERFACE cxx_std_20)
target_include_directories(baton_options INTERFACE ${PROJECT_SOURCE_DIR})
# (nvcc takes -Werror for its own.)
target_compile_options(baton_options INTERFACE -Wall -Wextra $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-Werror=unused-result> -Wno-unused-parameter
  -Wno-missing-field-initializers)
target_link_libraries(baton_options INTERFACE Threads::Threads)

# Headers of gRPC, protobuf and GoogleTest take most of the time of a small file; several files compiled as one share them.
# OFF compiles each by itself, which is quicker when one file has changed.
option(BATON_UNITY "Compile several source files of a target as one." ON)
function(baton_unity target)
  if(BATON_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
    # A source file that is included looks like a header, in which an anonymous namespace would be a fault.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# baton_library(NAME room SRCS a.cc b.cc DEPS lib...): one static library per room, without exceptions.
function(baton_library)
  cmake_parse_arguments(arg "" "NAME" "SRCS;DEPS" ${ARGN})
  if(arg_SRCS)
    add_library(baton_${arg_NAME} STATIC ${arg_SRCS})
    target_compile_options(baton_${arg_NAME} PRIVATE -fno-exceptions)
    baton_unity(baton_${arg_NAME})
    target_link_libraries(baton_${arg_NAME} PUBLIC baton_options ${arg_DEPS})
  else()
    add_library(baton_${arg_NAME} INTERFACE)
    target_link_libraries(baton_${arg_NAME} INTERFACE baton_options ${arg_DEPS})
  endif()
endfunction()

# Files that wrap a throwing library and turn its throw into a Status.
function(baton_allow_exceptions)
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS -fexceptions)
endfunction()

# baton_binary(NAME baton-router SRCS main.cc DEPS lib...): lands in build/bin, and is what `cmake --install` installs.
function(baton_binary)
  cmake_parse_arguments(arg "" "NAME" "SRCS;DEPS" ${ARGN})
  add_executable(${arg_NAME} ${arg_SRCS})
  target_compile_options(${arg_NAME} PRIVATE -fno-exceptions)
  target_link_libraries(${arg_NAME} PRIVATE baton_options ${arg_DEPS})
  set_target_properties(${arg_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  install(TARGETS ${arg_NAME} RUNTIME DESTINATION bin)
  add_dependencies(sanitized ${arg_NAME})
endfunction()

# baton_reads_any_enum(grpc_status.cc): gRPC's headers take a peer's number for an enumerator, whatever it is; UBSan minds.
function(baton_reads_any_enum)
  if(BATON_SANITIZE MATCHES "undefined")
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS -fno-sanitize=enum SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
endfunction()

# Test binaries are many: they take a third of the time to link so. What ships is linked as usual.
include(CheckLinkerFlag)
check_linker_flag(CXX -fuse-ld=gold BATON_HAS_GOLD)

# baton_test(NAME unit_kv SRCS a_test.cc DEPS lib... [LABELS unit] [TIMEOUT 60] [HEAVY] [BY_NAME]): one gtest binary, one
# ctest entry. HEAVY: its own lines compute for seconds. BY_NAME: built when it is asked for by name, and no ctest entry.
function(baton_test)
  cmake_parse_arguments(arg "HEAVY;BY_NAME" "NAME;TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT BATON_BUILD_TESTS)
    return()
  endif()
  add_executable(${arg_NAME} ${arg_SRCS})
  target_link_libraries(${arg_NAME} PRIVATE baton_options ${arg_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  baton_unity(${arg_NAME})
  target_compile_definitions(${arg_NAME} PRIVATE BATON_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  # A test's own lines run for moments and compile for long; what they test is compiled as it ships. Those of other suites compute
  # all: references of kernels, the simulation.
  if(arg_HEAVY OR arg_LABELS)
    target_compile_options(${arg_NAME} PRIVATE $<$<CONFIG:Release>:-O1>)
  else()
    target_compile_options(${arg_NAME} PRIVATE $<$<CONFIG:Release>:-O0>)
  endif()
  if(BATON_HAS_GOLD AND NOT BATON_SANITIZE)
    target_link_options(${arg_NAME} PRIVATE -fuse-ld=gold)
  endif()
  set_target_properties(${arg_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(arg_BY_NAME)
    set_target_properties(${arg_NAME} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  add_test(NAME ${arg_NAME} COMMAND ${arg_NAME} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(BATON_SANITIZE)
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 8")
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
  endif()
  set_tests_properties(${arg_NAME} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
  if(arg_LABELS MATCHES "^(unit|sim)$" OR arg_NAME MATCHES "^simt_(conformance|transport)$")
    add_dependencies(sanitized ${arg_NAME})
  endif()
endfunction()
