# Groups of sources: with ATTND_GROUPS, which the presets release, asan and tsan set, up to eight sources of a target are
# compiled as one, in about half of the time. The presets debug and clang compile each source by itself.
#
# As CMake's own unity builds, but for one thing: a group names its sources relative to the project, so that one compiler
# cache serves every checkout.
option(ATTND_GROUPS "Compile up to eight sources of a target as one" OFF)
set(ATTND_GROUP_SIZE 8)

# attnd_apart(SOURCE...): sources of this folder that cannot stand in a group, as a name that is only theirs is also in
# another source of the group.
function(attnd_apart)
  set_source_files_properties(${ARGN} PROPERTIES ATTND_APART ON)
endfunction()

# attnd_split_sources(TARGET GROUPED OTHERS): the sources of the project that may stand in a group, relative to the project,
# and all others of TARGET: generated ones, and those with options of their own.
function(attnd_split_sources target grouped others)
  get_target_property(sources ${target} SOURCES)
  get_target_property(folder ${target} SOURCE_DIR)
  set(in)
  set(out)
  foreach(source ${sources})
    get_filename_component(path ${source} ABSOLUTE BASE_DIR ${folder})
    get_source_file_property(apart ${path} TARGET_DIRECTORY ${target} ATTND_APART)
    get_source_file_property(options ${path} TARGET_DIRECTORY ${target} COMPILE_OPTIONS)
    get_source_file_property(definitions ${path} TARGET_DIRECTORY ${target} COMPILE_DEFINITIONS)
    file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR} ${path})
    cmake_path(IS_PREFIX PROJECT_BINARY_DIR ${path} built)
    if(name MATCHES "\\.cc$" AND NOT built AND NOT apart AND NOT options AND NOT definitions)
      list(APPEND in ${name})
    else()
      list(APPEND out ${source})
    endif()
  endforeach()
  set(${grouped} ${in} PARENT_SCOPE)
  set(${others} ${out} PARENT_SCOPE)
endfunction()

# attnd_group(): puts the sources of the project's targets into groups. Called when every target is there.
function(attnd_group)
  if(NOT ATTND_GROUPS)
    return()
  endif()
  attnd_targets_below(${PROJECT_SOURCE_DIR} targets)
  foreach(target ${targets})
    get_target_property(type ${target} TYPE)
    if(NOT type MATCHES "^(STATIC_LIBRARY|OBJECT_LIBRARY|EXECUTABLE)$")
      continue()
    endif()
    attnd_split_sources(${target} grouped others)
    list(LENGTH grouped count)
    if(count LESS 2)
      continue()
    endif()
    set(number 0)
    list(TRANSFORM grouped REPLACE "(.+)" "#include \"\\1\"")
    while(number LESS count)
      list(SUBLIST grouped ${number} ${ATTND_GROUP_SIZE} group)
      list(JOIN group "\n" text)
      set(file ${PROJECT_BINARY_DIR}/groups/${target}/group_${number}.cc)
      file(CONFIGURE OUTPUT ${file} CONTENT "${text}\n" @ONLY)
      list(APPEND others ${file})
      math(EXPR number "${number} + ${ATTND_GROUP_SIZE}")
    endwhile()
    set_property(TARGET ${target} PROPERTY SOURCES ${others})
  endforeach()
endfunction()
