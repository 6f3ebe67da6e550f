// Copies past the caches: what is not read again soon.
#ifndef PLAIT_CSRC_STREAM_COPY_HPP_
#define PLAIT_CSRC_STREAM_COPY_HPP_

#include <cstddef>

namespace plait {

// memcpy by stores that go to memory directly where the processor has them: it
// does not read the target first, and the caches keep what training had in
// them. All is visible to other threads as after memcpy. Stores have `width`
// bytes at most (64 or 32; 0: memcpy's own).
void stream_copy(void* to, const void* from, size_t bytes, int width = 64);

}  // namespace plait

#endif  // PLAIT_CSRC_STREAM_COPY_HPP_
