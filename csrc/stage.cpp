#include "stage.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "errors.hpp"
#include "file.hpp"

namespace plait {

// Below this in total, starting a thread costs more than the copy.
constexpr uint64_t kAloneBytes = uint64_t{4} << 20;

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
      states_(plan_.parts.size(), State::kPending),
      left_(plan_.num_blocks, block_bytes),
      written_(plan_.num_blocks),
      hasher_(pieces_) {
  if (threads_ < 1) {
    throw std::invalid_argument("Stage: threads must be >= 1");
  }
  bytes_left_ = round_up(file_bytes, kDirectAlignment);
  left_.back() -= plan_.num_blocks * block_bytes - bytes_left_;
  for (const StagePart& part : plan_.parts) {
    eager_left_ += part.piece >= 0 && !part.lazy ? part.bytes : 0;
  }
}

Stage::~Stage() { close(); }

char* Stage::memory(uint64_t file_offset) const {
  return mapping_->data() + plan_.pool_offsets[file_offset / block_bytes()] +
         file_offset % block_bytes();
}

bool Stage::has_slot(uint64_t block) const {
  const int64_t before = plan_.predecessors[block];
  return before < 0 || written_[static_cast<size_t>(before)];
}

// Needs a pending part with a slot; gives the lock back meanwhile.
void Stage::copy(size_t index, Lock& lock) {
  const StagePart& part = plan_.parts[index];
  states_[index] = State::kRunning;
  ++running_;
  lock.unlock();
  char* const target = memory(part.file_offset);
  if (part.source == nullptr) {
    std::memset(target, 0, part.bytes);
  } else {
    std::memcpy(target, part.source, part.bytes);
  }
  const bool torn = part.lazy && lazy_.is_changed(index, target);
  lock.lock();
  states_[index] = State::kDone;
  --running_;
  if (torn) {
    end(std::make_exception_ptr(
        TornError("Stage: changed before it was copied", part.piece)));
    return;
  }
  eager_left_ -= part.piece >= 0 && !part.lazy ? part.bytes : 0;
  count_in(part.file_offset, part.bytes);
}

void Stage::count_in(uint64_t file_offset, uint64_t bytes) {
  while (bytes > 0) {
    const uint64_t block = file_offset / block_bytes();
    const uint64_t step =
        std::min(bytes, (block + 1) * block_bytes() - file_offset);
    if (block >= left_.size() || step > left_[block]) {
      throw std::invalid_argument("Stage: a block has more than its bytes");
    }
    left_[block] -= step;
    bytes_left_ -= step;
    file_offset += step;
    bytes -= step;
  }
  changed_.notify_all();
}

void Stage::end(std::exception_ptr reason) {
  if (!over_) {
    over_ = std::move(reason);
  }
  changed_.notify_all();
}

void Stage::throw_if_over() const {
  if (over_) {
    std::rethrow_exception(over_);
  }
}

void Stage::work() {
  bool lowered = false;
  Lock lock(mutex_);
  while (!over_) {
    while (next_part_ < states_.size() &&
           states_[next_part_] != State::kPending) {
      ++next_part_;
    }
    if (next_part_ == states_.size()) {
      return;
    }
    const StagePart& part = plan_.parts[next_part_];
    if ((part.lazy || part.in_turn) && !lowered) {
      lowered = true;
      lock.unlock();
      lower_priority({kBackgroundNice, IoPriority::kNormal});
      lock.lock();
      continue;
    }
    if (has_slot(part.file_offset / block_bytes())) {
      copy(next_part_, lock);
    } else {
      changed_.wait(lock);
    }
  }
}

void Stage::start_threads(const Priority& priority) {
  if (!workers_) {
    workers_ = std::make_unique<Workers>(
        threads_, "plait-copy", static_cast<uint64_t>(threads_),
        [this](int, uint64_t) { work(); }, priority);
  }
}

void Stage::start() {
  Lock lock(mutex_);
  if (slabs() > 1 || eager_left_ > kAloneBytes) {
    start_threads({});
  }
}

void Stage::capture() {
  start();
  Lock lock(mutex_);
  const bool alone = bytes_left_ <= kAloneBytes;
  for (size_t i = 0; i < states_.size() && !over_; ++i) {
    const StagePart& part = plan_.parts[i];
    if (part.in_turn || (part.lazy && !alone)) {
      break;
    }
    if (states_[i] == State::kPending) {
      copy(i, lock);
    }
  }
  changed_.wait(lock, [&] { return over_ || eager_left_ == 0; });
  if (!alone && !over_) {  // Last: they compete with the caller for its CPU.
    start_threads({kBackgroundNice, IoPriority::kNormal});
  }
}

void Stage::fence(const std::vector<Range>& ranges) {
  const std::vector<size_t> wanted = lazy_.overlapping(ranges);
  Lock lock(mutex_);
  for (const size_t index : wanted) {
    const uint64_t block = plan_.parts[index].file_offset / block_bytes();
    changed_.wait(lock, [&] {
      return over_ || states_[index] != State::kPending || has_slot(block);
    });
    if (!over_ && states_[index] == State::kPending) {
      copy(index, lock);
    }
  }
  for (const size_t index : wanted) {
    changed_.wait(lock, [&] { return states_[index] != State::kRunning; });
  }
}

void Stage::wait_copied() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return over_ || bytes_left_ == 0; });
  throw_if_over();
}

bool Stage::copied() const {
  Lock lock(mutex_);
  return bytes_left_ == 0 || (over_ && running_ == 0);
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

void Stage::fill(uint64_t file_offset, uint64_t bytes) {
  Lock lock(mutex_);
  count_in(file_offset, bytes);
}

void Stage::close() {
  cancel("the stage is closed");
  Lock lock(mutex_);
  std::unique_ptr<Workers> workers = std::move(workers_);
  lock.unlock();
  workers.reset();  // Joins.
  lock.lock();
  changed_.wait(lock, [&] { return running_ == 0; });
}

const char* Stage::block(int, uint64_t block, size_t, uint32_t* crc) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] {
    return over_ || (left_[block] == 0 && hashed_blocks_ == block);
  });
  throw_if_over();
  lock.unlock();
  const uint64_t begin = block * block_bytes();
  const uint64_t end = std::min(begin + block_bytes(), file_bytes_);
  const char* const data = memory(begin);
  *crc = hasher_.update(data, begin, end, end == file_bytes_);
  lock.lock();
  ++hashed_blocks_;
  changed_.notify_all();
  return data;
}

void Stage::give_up(std::exception_ptr reason) {
  Lock lock(mutex_);
  end(std::move(reason));
}

}  // namespace plait
