// Copies one state into the pool, block by block of its file, and hands the
// blocks to a writer. Not a writer, and it knows no tensors.
//
// The one idea: whoever needs a copy first makes it. Threads copy in the
// background; the capture call helps with what must be in before it returns,
// and a fence with what is about to be overwritten.
#ifndef PLAIT_CSRC_STAGE_HPP_
#define PLAIT_CSRC_STAGE_HPP_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "block_source.hpp"
#include "lazy_parts.hpp"
#include "stage_hasher.hpp"
#include "stage_plan.hpp"
#include "stage_progress.hpp"
#include "staging_pool.hpp"
#include "workers.hpp"

namespace plait {

// Owns its copying threads (named plait-copy-N, ended by close() or by
// themselves) and a share of the pool's memory, which nothing else may use
// until the stage is closed. The memory of the pieces must stay valid until
// copied(), and that of lazy ones unchanged until a fence over it returned;
// samples of it (64 bytes a part) are compared before and after, and a change
// ends the stage with TornError. Once over (torn, cancelled, closed), fences
// and captures return at once, and whoever waits for blocks is thrown the
// reason. All methods may be called from any thread.
class Stage final : public BlockSource {
 public:
  using Range = LazyParts::Range;

  // Plans, and samples the lazy pieces as they are now. Starts nothing.
  Stage(const StagingPool& pool, std::string header,
        std::vector<StagedPiece> pieces, uint64_t file_bytes,
        uint64_t block_bytes, int threads);
  ~Stage() override;
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  uint64_t file_bytes() const { return file_bytes_; }
  uint64_t block_bytes() const { return plan_.block_bytes; }
  uint64_t slabs() const { return plan_.slabs; }
  uint64_t held_bytes() const { return plan_.held_bytes; }

  // Starts the threads if the call needs them. In slabs to be called before
  // anything is filled in.
  void start();
  // Returns when every piece is in that is not lazy and has an address; the
  // others are copied by threads at low priority from then on. In slabs that
  // needs a writer at work, and all that lies before in the file filled in.
  void capture();
  // 1: the caller waits for the save from now on, and no processor is kept for
  // training; -1: no longer.
  void hurry(int more) {
    Lock lock(mutex_);
    count_waiting(more);
  }
  // To be called before memory is overwritten: returns when nothing of these
  // ranges is still to be read.
  void fence(const std::vector<Range>& ranges);
  // The same for everything, also what the caller fills in. Throws the reason
  // when over.
  void wait_copied();
  // True when everything is in, or over: no memory of the pieces is read again.
  bool copied() const;

  // For pieces without an address, to be filled in file order: waits for the
  // slot, returns the pool offset of a range inside one block (or, where all
  // blocks have a place, of any); then fill() says that it is in.
  uint64_t open(uint64_t file_offset, uint64_t bytes);
  void fill(uint64_t file_offset, uint64_t bytes) {
    Lock lock(mutex_);
    come_in(progress_.count_in(file_offset, bytes));
  }

  // Ends it with std::runtime_error(reason), unless it is over already.
  void cancel(const std::string& reason) {
    give_up(std::make_exception_ptr(std::runtime_error(reason)));
  }
  // Ends it, and returns when no thread of it reads any memory.
  void close();

  // Where one processor trains and the other copies, none is left for a writer
  // that copies too: training would wait for the copies in its fence.
  void begin(bool copied) override {
    Lock lock(mutex_);
    copies_first_ = copied && std::thread::hardware_concurrency() <= 2;
  }
  const char* block(int worker, uint64_t block, size_t bytes,
                    uint32_t* crc) override;
  void written(uint64_t block) override {
    std::unique_lock<std::mutex> lock(mutex_);
    written_[block] = true;
    if (slabs() > 1) {
      changed_.notify_all();
    }
  }
  void give_up(std::exception_ptr reason) override {
    Lock lock(mutex_);
    end(std::move(reason));
  }
  // XXH3-128 of every piece that is complete, in their order.
  std::vector<std::string> hashes() const {
    std::unique_lock<std::mutex> lock(mutex_);
    return hasher_.hashes();
  }

 private:
  using State = StageProgress::State;
  using Lock = std::unique_lock<std::mutex>;

  char* memory(uint64_t file_offset) const {
    return mapping_->data() + plan_.pool_offsets[file_offset / block_bytes()] +
           file_offset % block_bytes();
  }
  bool has_slot(uint64_t block) const {
    const int64_t before = plan_.predecessors[block];
    return before < 0 || written_[static_cast<size_t>(before)];
  }
  void throw_if_over() const {
    if (over_) {
      std::rethrow_exception(over_);
    }
  }
  void copy(size_t index, Lock& lock, bool calm = false);
  void come_in(bool completed);
  bool hash(Lock& lock);
  void hashed(uint64_t bytes) {
    if (progress_.end_hash(bytes)) {
      to_write_.notify_all();
    }
  }
  void start_threads(const Priority& priority);
  void work(int worker);
  // Somebody waits for copies from now on, or no longer.
  void count_waiting(int more) {
    hurried_ += more;
    changed_.notify_all();
  }
  void set_calm(bool calm) {
    if (calm_ && !calm) {
      to_write_.notify_all();  // It is the writers' turn to hash.
    }
    calm_ = calm;
  }
  void end(std::exception_ptr reason);

  const std::string header_;
  const std::vector<StagedPiece> pieces_;
  const uint64_t file_bytes_;
  const int threads_;
  const StagePlan plan_;
  const std::shared_ptr<HugeMapping> mapping_;
  const LazyParts lazy_;

  mutable std::mutex mutex_;  // Guards everything below but the hasher.
  std::condition_variable changed_;   // All but what writers wait for:
  std::condition_variable to_write_;  // a block to write, or to hash.
  StageProgress progress_;
  std::vector<bool> written_;  // Blocks.
  int hurried_ = 0;            // Who waits: then only copying counts.
  bool calm_ = false;          // A thread hashes what it copies; no writer does.
  bool copies_first_ = false;  // Meanwhile no writer writes.
  std::exception_ptr over_;
  std::unique_ptr<Workers> workers_;

  StageHasher hasher_;  // Of who has the turn to hash, without the lock.
};

}  // namespace plait

#endif  // PLAIT_CSRC_STAGE_HPP_
