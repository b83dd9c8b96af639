# Everything comes from the distribution's packages (scripts/lib/packages.sh lists them).
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(TBB REQUIRED)

find_package(PkgConfig REQUIRED)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)
pkg_check_modules(LIBURING REQUIRED IMPORTED_TARGET liburing)
pkg_check_modules(ISAL REQUIRED IMPORTED_TARGET libisal)
find_package(OpenSSL REQUIRED)
find_package(glog REQUIRED)
find_package(Protobuf REQUIRED)
if(ATTND_SANITIZE MATCHES "thread")
  # A header that keeps the layout of the library, which is not instrumented.
  set_property(TARGET protobuf::libprotobuf APPEND PROPERTY
    INTERFACE_INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/cmake/tsan)
endif()
find_package(RocksDB CONFIG REQUIRED)

if(ATTND_SERVICE)
  find_package(gRPC CONFIG REQUIRED)
  find_package(prometheus-cpp CONFIG REQUIRED)
endif()
if(ATTND_TESTS)
  find_package(GTest REQUIRED)
endif()
if(ATTND_BENCH)
  find_package(benchmark REQUIRED)
endif()
