// SPDX-License-Identifier: Apache-2.0
// A precompiled header is made for a target that has a source.
