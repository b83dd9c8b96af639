// SPDX-License-Identifier: Apache-2.0
//
// What the thread sanitizer must not look at, in every test binary. Distribution libraries are not
// instrumented: the sanitizer sees their memory come and go but not the atomics that order this.
//   RocksDB: a race of ours has stacks without it.
//   oneTBB: clears its own memory (attention/cpu/worker_pool.cc tells the orders that matter).
//   Abseil's StrError and protobuf's UnknownFieldSet::default_instance: tables that are made at
//   first use, behind a guard whose fast path is in the library.
extern "C" const char* __tsan_default_suppressions();  // NOLINT: the sanitizer's name
extern "C" const char* __tsan_default_suppressions() {
  return "race:librocksdb.so\n"
         "called_from_lib:libtbb.so\n"
         "race:base_internal::StrError\n"
         "race:google::protobuf::UnknownFieldSet::empty\n";
}
