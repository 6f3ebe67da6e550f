#include "stage.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "errors.hpp"
#include "file.hpp"
#include "stream_copy.hpp"

namespace plait {

// Below this in total, starting a thread costs more than the copy.
constexpr uint64_t kAloneBytes = uint64_t{4} << 20;
// Of threads that work after the capture call, beside training.
const Priority kLate{kBackgroundNice, IoPriority::kNormal};

Stage::Stage(const StagingPool& pool, std::string header,
             std::vector<StagedPiece> pieces, uint64_t file_bytes,
             uint64_t block_bytes, int threads)
    : header_(std::move(header)),
      pieces_(std::move(pieces)),
      file_bytes_(file_bytes),
      threads_(threads),
      plan_(plan_stage(header_, pieces_, file_bytes, block_bytes,
                       pool.capacity())),
      mapping_(pool.view(0, 0)),
      lazy_(plan_.parts),
      progress_(plan_, file_bytes),
      written_(plan_.num_blocks),
      hasher_(pieces_, file_bytes, block_bytes) {
  if (threads_ < 1) {
    throw std::invalid_argument("Stage: threads must be >= 1");
  }
}

Stage::~Stage() { close(); }

// Needs a pending part with a slot; gives the lock back meanwhile. calm: hashes
// it too where it is next, which spares reading it again from memory.
void Stage::copy(size_t index, Lock& lock, bool calm) {
  const StagePart& part = plan_.parts[index];
  const bool hashes = calm && progress_.is_next_to_hash(index);
  if (hashes) {
    progress_.begin_hash();
  }
  progress_.begin(index);
  lock.unlock();
  char* const target = memory(part.file_offset);
  if (part.source == nullptr) {
    std::memset(target, 0, part.bytes);
  } else if (hashes) {
    hasher_.copy(target, part.source, part.bytes);
  } else {
    stream_copy(target, part.source, part.bytes);
  }
  const bool torn = part.lazy && lazy_.is_changed(index, target);
  lock.lock();
  if (torn) {
    end(std::make_exception_ptr(
        TornError("Stage: changed before it was copied", part.piece)));
  }
  const bool was_eager = !progress_.eager_in();
  const bool completed = progress_.end(index);
  if (hashes) {
    hashed(part.bytes);
  }
  come_in(completed);
  if (over_ || hurried_ > 0 || (was_eager && progress_.eager_in())) {
    changed_.notify_all();
  }
}

// Wakes who waits for bytes that are in. completed: a block.
void Stage::come_in(bool completed) {
  if (completed && (!calm_ || progress_.all_hashed())) {
    to_write_.notify_all();
  }
  if (progress_.all_in()) {
    changed_.notify_all();
  }
}

// Hashes from memory what has come in, once; false where nothing has.
bool Stage::hash(Lock& lock) {
  const uint64_t bytes = progress_.hashable();
  if (bytes == 0) {
    return false;
  }
  progress_.begin_hash();
  const char* const data = memory(progress_.hashed_bytes());
  lock.unlock();
  hasher_.update(data, bytes);
  lock.lock();
  hashed(bytes);
  return true;
}

void Stage::end(std::exception_ptr reason) {
  if (!over_) {
    over_ = std::move(reason);
  }
  changed_.notify_all();
  to_write_.notify_all();
}

// A thread's share of the copying. While nobody waits for it the first thread
// does it all and hashes as it goes, in order; a second one would copy out of
// order, to be read again, and compete for the cores of training.
void Stage::work(int worker) {
  bool lowered = false;
  Lock lock(mutex_);
  while (!over_) {
    const size_t next = progress_.next_pending();
    if (next == plan_.parts.size()) {
      break;
    }
    const StagePart& part = plan_.parts[next];
    if ((part.lazy || part.in_turn) && !lowered) {
      lowered = true;
      lock.unlock();
      lower_priority(kLate);
      lock.lock();
      continue;
    }
    const bool ready = has_slot(part.file_offset / block_bytes());
    const bool calm = ready && part.lazy && hurried_ == 0;
    if (worker == 0) {
      set_calm(calm);
      if (calm && hash(lock)) {
        continue;
      }
    }
    if (ready && (worker == 0 || !calm)) {
      copy(next, lock, calm);
    } else {
      changed_.wait(lock);
    }
  }
  if (worker == 0) {
    set_calm(false);
  }
}

void Stage::start_threads(const Priority& priority) {
  if (!workers_) {
    workers_ = std::make_unique<Workers>(
        threads_, "plait-copy", static_cast<uint64_t>(threads_),
        [this](int worker, uint64_t) { work(worker); }, priority);
  }
}

void Stage::start() {
  Lock lock(mutex_);
  if (slabs() > 1 || progress_.eager_left() > kAloneBytes) {
    start_threads({});
  }
}

void Stage::capture() {
  start();
  Lock lock(mutex_);
  const bool alone = progress_.bytes_left() <= kAloneBytes;
  for (size_t i = 0; i < plan_.parts.size() && !over_; ++i) {
    const StagePart& part = plan_.parts[i];
    if (part.in_turn || (part.lazy && !alone)) {
      break;
    }
    // Zeros between pieces can wait: all over the file, a miss each.
    if (progress_.state(i) == State::kPending && (part.piece >= 0 || alone)) {
      copy(i, lock);
    }
  }
  changed_.wait(lock, [&] { return over_ || progress_.eager_in(); });
  if (!alone && !over_) {
    start_threads(kLate);
  }
}

void Stage::fence(const std::vector<Range>& ranges) {
  const std::vector<size_t> wanted = lazy_.overlapping(ranges);
  Lock lock(mutex_);
  count_waiting(1);
  for (const size_t index : wanted) {
    const uint64_t block = plan_.parts[index].file_offset / block_bytes();
    changed_.wait(lock, [&] {
      return over_ || progress_.state(index) != State::kPending ||
             has_slot(block);
    });
    if (!over_ && progress_.state(index) == State::kPending) {
      copy(index, lock);
    }
  }
  for (const size_t index : wanted) {
    changed_.wait(lock,
                  [&] { return progress_.state(index) != State::kRunning; });
  }
  count_waiting(-1);
}

void Stage::wait_copied() {
  Lock lock(mutex_);
  count_waiting(1);
  changed_.wait(lock, [&] { return over_ || progress_.all_in(); });
  count_waiting(-1);
  throw_if_over();
}

bool Stage::copied() const {
  Lock lock(mutex_);
  return progress_.all_in() || (over_ && progress_.running() == 0);
}

uint64_t Stage::open(uint64_t file_offset, uint64_t bytes) {
  const uint64_t block = file_offset / block_bytes();
  if (file_offset >= file_bytes_ || bytes > file_bytes_ - file_offset ||
      (slabs() > 1 && file_offset % block_bytes() + bytes > block_bytes())) {
    throw std::invalid_argument("Stage: the range at " +
                                std::to_string(file_offset) +
                                " is not inside one block of the file");
  }
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return over_ || has_slot(block); });
  throw_if_over();
  return plan_.pool_offsets[block] + file_offset % block_bytes();
}

void Stage::close() {
  cancel("the stage is closed");
  Lock lock(mutex_);
  std::unique_ptr<Workers> workers = std::move(workers_);
  lock.unlock();
  workers.reset();  // Joins.
  lock.lock();
  changed_.wait(lock, [&] { return progress_.running() == 0; });
}

const char* Stage::block(int, uint64_t block, size_t, uint32_t* crc) {
  Lock lock(mutex_);
  while (!over_ && (!progress_.is_ready(block) || (calm_ && copies_first_))) {
    if (calm_ || !hash(lock)) {
      to_write_.wait(lock);
    }
  }
  throw_if_over();
  *crc = hasher_.crc(block);
  return memory(block * block_bytes());
}

}  // namespace plait
