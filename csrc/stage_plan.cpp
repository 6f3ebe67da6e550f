#include "stage_plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "file.hpp"

namespace plait {
namespace {

void check_piece(const StagedPiece& piece, uint64_t end, uint64_t file_bytes) {
  const std::string name = "Stage: the piece at offset " +
                           std::to_string(piece.file_offset) + " of " +
                           std::to_string(piece.bytes) + " bytes ";
  if (piece.file_offset > file_bytes ||
      piece.bytes > file_bytes - piece.file_offset) {
    throw std::invalid_argument(name + "ends after file_bytes " +
                                std::to_string(file_bytes));
  }
  if (piece.file_offset < end) {
    throw std::invalid_argument(name + "begins before the end of the one " +
                                "before it (or the header), " +
                                std::to_string(end));
  }
}

// Adds the parts of one range, cut at blocks and at kPartBytes.
void add_parts(StagePlan& plan, const char* source, uint64_t bytes,
               uint64_t file_offset, int64_t piece, bool lazy) {
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t at = file_offset + done;
    const uint64_t in_block = plan.block_bytes - at % plan.block_bytes;
    const uint64_t step = std::min({bytes - done, in_block, kPartBytes});
    plan.parts.push_back({source == nullptr ? nullptr : source + done, step, at,
                          piece, lazy, false});
    done += step;
  }
}

// Gives each block its place. Blocks in `eager` keep one of their own as long
// as the others are left enough slots to keep copies and writes both going.
void place_blocks(StagePlan& plan, const std::vector<bool>& eager,
                  uint64_t file_bytes, uint64_t pool_bytes) {
  plan.pool_offsets.resize(plan.num_blocks);
  plan.predecessors.assign(plan.num_blocks, -1);
  if (round_up(file_bytes, kDirectAlignment) <= pool_bytes) {
    for (uint64_t block = 0; block < plan.num_blocks; ++block) {
      plan.pool_offsets[block] = block * plan.block_bytes;
    }
    return;
  }
  const uint64_t slots = pool_bytes / plan.block_bytes;
  if (slots < 2) {
    throw std::invalid_argument(
        "Stage: a pool of " + std::to_string(pool_bytes) +
        " bytes is smaller than the file and than two blocks of " +
        std::to_string(plan.block_bytes));
  }
  const uint64_t num_eager =
      static_cast<uint64_t>(std::count(eager.begin(), eager.end(), true));
  const uint64_t fixed = num_eager + 2 <= slots ? num_eager : 0;
  const uint64_t ring = slots - fixed;
  std::vector<uint64_t> in_turn;
  uint64_t next_fixed = ring;
  for (uint64_t block = 0; block < plan.num_blocks; ++block) {
    if (fixed > 0 && eager[block]) {
      plan.pool_offsets[block] = next_fixed++ * plan.block_bytes;
      continue;
    }
    const uint64_t turn = in_turn.size();
    plan.pool_offsets[block] = turn % ring * plan.block_bytes;
    if (turn >= ring) {
      plan.predecessors[block] = static_cast<int64_t>(in_turn[turn - ring]);
      plan.held_bytes += plan.block_bytes;
    }
    in_turn.push_back(block);
  }
  plan.slabs = (in_turn.size() + ring - 1) / ring;
  for (StagePart& part : plan.parts) {
    const uint64_t block = part.file_offset / plan.block_bytes;
    part.in_turn = fixed == 0 || !eager[block];
  }
}

}  // namespace

StagePlan plan_stage(const std::string& header,
                     const std::vector<StagedPiece>& pieces,
                     uint64_t file_bytes, uint64_t block_bytes,
                     uint64_t pool_bytes) {
  if (block_bytes == 0 || block_bytes % kDirectAlignment != 0) {
    throw std::invalid_argument("Stage: block_bytes is " +
                                std::to_string(block_bytes) +
                                ", must be a positive multiple of 4096");
  }
  if (file_bytes == 0) {
    throw std::invalid_argument("Stage: file_bytes is 0");
  }
  StagePlan plan;
  plan.block_bytes = block_bytes;
  plan.num_blocks = (file_bytes + block_bytes - 1) / block_bytes;
  check_piece({0, header.size(), 0, false}, 0, file_bytes);
  add_parts(plan, header.data(), header.size(), 0, -1, false);
  uint64_t end = header.size();
  std::vector<bool> eager(plan.num_blocks);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const StagedPiece& piece = pieces[i];
    check_piece(piece, end, file_bytes);
    add_parts(plan, nullptr, piece.file_offset - end, end, -1, false);
    end = piece.file_offset + piece.bytes;
    if (piece.address != 0) {
      add_parts(plan, reinterpret_cast<const char*>(piece.address), piece.bytes,
                piece.file_offset, static_cast<int64_t>(i), piece.lazy);
    }
    if (!piece.lazy && piece.bytes > 0) {
      const uint64_t last = (end - 1) / block_bytes;
      for (uint64_t b = piece.file_offset / block_bytes; b <= last; ++b) {
        eager[b] = true;
      }
    }
  }
  // The file's end, and what direct I/O writes behind it.
  const uint64_t padded =
      std::min(round_up(file_bytes, kDirectAlignment),
               plan.num_blocks * block_bytes);
  add_parts(plan, nullptr, padded - end, end, -1, false);
  place_blocks(plan, eager, file_bytes, pool_bytes);
  // What the capture call waits for, then the rest that has a place, then what
  // has to wait for one; each in the order of the file.
  std::stable_sort(plan.parts.begin(), plan.parts.end(),
                   [](const StagePart& a, const StagePart& b) {
                     const int group_a = a.in_turn ? 2 : a.lazy ? 1 : 0;
                     const int group_b = b.in_turn ? 2 : b.lazy ? 1 : 0;
                     return std::tie(group_a, a.file_offset) <
                            std::tie(group_b, b.file_offset);
                   });
  return plan;
}

}  // namespace plait
