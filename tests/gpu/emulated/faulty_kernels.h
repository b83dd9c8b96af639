// SPDX-License-Identifier: Apache-2.0
//
// Small kernels, with and without a fault, that show what the emulated device sees.
#ifndef ATTND_TESTS_GPU_EMULATED_FAULTY_KERNELS_H_
#define ATTND_TESTS_GPU_EMULATED_FAULTY_KERNELS_H_

#include <cstdint>

namespace attnd::gpu::emulated {

// Each runs in two thread blocks of 64 threads over kFaultyWords words of device memory.
inline constexpr uint32_t kFaultyWords = 128;
using FaultyKernel = void (*)(uint32_t* words, bool right);

void ReadsANeighboursWord(uint32_t* words, bool right);
void ReadsANeighboursWordInItsWarp(uint32_t* words, bool right);
void OverwritesWhatIsRead(uint32_t* words, bool right);
void LeavesDeviceMemory(uint32_t* words, bool right);
void LeavesSharedMemory(uint32_t* words, bool right);
void LeavesAnArray(uint32_t* words, bool right);
void LoadsUnaligned(uint32_t* words, bool right);
void ReadsWhatNobodyWrote(uint32_t* words, bool right);
void ReadsBeforeTheCopyHasEnded(uint32_t* words, bool right);
void AddsWithoutAtomics(uint32_t* words, bool right);
void WritesAcrossBlocks(uint32_t* words, bool right);
void ShufflesBesideABarrier(uint32_t* words, bool right);
void LeavesABarrierOut(uint32_t* words, bool right);

// Runs one; the device memory's words afterwards go to `words`.
void RunFaulty(FaultyKernel kernel, bool right, uint32_t (&words)[kFaultyWords]);

}  // namespace attnd::gpu::emulated

#endif  // ATTND_TESTS_GPU_EMULATED_FAULTY_KERNELS_H_
