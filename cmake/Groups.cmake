# Groups of sources: with CMAKE_UNITY_BUILD, which the presets of the sanitizers set, CMake compiles up to eight sources of
# a target as one, in about half of the time. The release build and clang's compile each source by itself.
set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)

# attnd_apart(SOURCE...): sources of this folder that cannot stand in a group, as a name that is only theirs is also in
# another source of the group.
function(attnd_apart)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
