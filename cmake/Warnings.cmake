# Compile options of the project's own code; generated code is exempt (target_link_libraries to attnd_options is what
# turns them on).
add_library(attnd_options INTERFACE)
target_compile_options(attnd_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor;-Werror>")
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(attnd_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wthread-safety;-Wreserved-identifier>")
  # Of tests, too, which each version of clang sees with other eyes: here its warnings are no errors.
  if(ATTND_SANITIZE)
    target_compile_options(attnd_options INTERFACE -Wno-error)
  endif()
endif()
target_include_directories(attnd_options INTERFACE ${PROJECT_SOURCE_DIR})

if(ATTND_SANITIZE)
  add_compile_options(-fsanitize=${ATTND_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ATTND_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND ATTND_SANITIZE MATCHES "address")
    add_compile_definitions(__SANITIZE_ADDRESS__)  # as GCC has it
  endif()
endif()
if((ATTND_SANITIZE OR ATTND_COVERAGE) AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # At -O1 GCC takes members of empty optionals for read before they are written; the release build looks for those that are.
  target_compile_options(attnd_options INTERFACE -Wno-maybe-uninitialized)
endif()

# Product code counts which of its lines run (scripts/coverage.sh); tests/CMakeLists.txt takes the counting out of tests.
if(ATTND_COVERAGE)
  add_compile_options(--coverage)
  add_link_options(--coverage)
endif()

# attnd_computes(TARGET...): libraries where tests spend their time. They keep -O2 where the rest is compiled with less:
# in sanitizer builds (CMakePresets.json) and, in tests/, everywhere.
function(attnd_computes)
  foreach(target ${ARGN})
    get_target_property(folder ${target} SOURCE_DIR)
    if(ATTND_SANITIZE OR ATTND_COVERAGE OR folder MATCHES "^${PROJECT_SOURCE_DIR}/tests")
      target_compile_options(${target} PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O2>)
    endif()
  endforeach()
endfunction()
