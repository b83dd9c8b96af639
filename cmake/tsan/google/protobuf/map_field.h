// SPDX-License-Identifier: Apache-2.0
//
// Stands before protobuf's own header in builds with the thread sanitizer. That header gives map
// fields two members more when the compiler has the sanitizer on; the distribution's library was
// built without it, and its code (Struct's, and the base of every map field) would read and write
// at other offsets than ours. So the header is read as the library was built.
#pragma once

#include <memory>  // the C++ library looks at the same macro, and is to see it

#pragma push_macro("__SANITIZE_THREAD__")
#undef __SANITIZE_THREAD__
#include_next <google/protobuf/map_field.h>
#pragma pop_macro("__SANITIZE_THREAD__")
