// The plans of one device, by what they depend on. A resource of the device's ResourceMgr, shared by all sessions and
// functions that run there, and bounded: the plans used least recently go first.
#pragma once

#include <array>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "kernels/matmul.h"
#include "ops/common.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace blocksparse {

class MatmulPlans : public tensorflow::ResourceBase {
 public:
  struct Entry {
    MatmulPlan plan;
    tensorflow::Tensor words;  // the plan's copy in device memory; empty on the CPU
  };

  // The layout's fingerprint, then CB, KB, blocks, product, axis, bsize, dtype, family.
  using Key = std::array<uint32_t, 12>;

  static Key MakeKey(const MatmulProblem& problem, const LayoutTable& table, const MatmulChoice& choice) {
    const auto& f = table.fingerprint;
    return {f[0],
            f[1],
            f[2],
            f[3],
            uint32_t(table.CB),
            uint32_t(table.KB),
            uint32_t(table.blocks),
            uint32_t(problem.product),
            uint32_t(problem.axis),
            uint32_t(problem.bsize),
            uint32_t(problem.dtype),
            uint32_t(choice.family)};
  }

  std::shared_ptr<const Entry> Find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = index_.find(key);
    if (it == index_.end()) return nullptr;
    recent_.splice(recent_.begin(), recent_, it->second);
    return it->second->second;
  }

  // Keeps `entry`, or what another thread put there meanwhile; returns what is kept.
  std::shared_ptr<const Entry> Insert(const Key& key, std::shared_ptr<const Entry> entry) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto it = index_.find(key); it != index_.end()) return it->second->second;
    words_ += int64_t(entry->plan.words.size());
    recent_.emplace_front(key, entry);
    index_[key] = recent_.begin();
    // A layout that changes all the time (pruning, growth) must not fill the memory. The newest plan always stays.
    while (words_ > kMaxWords && recent_.size() > 1) {
      words_ -= int64_t(recent_.back().second->plan.words.size());
      index_.erase(recent_.back().first);
      recent_.pop_back();
    }
    return entry;
  }

  std::string DebugString() const override { return "plans of block-sparse products"; }

 private:
  static constexpr int64_t kMaxWords = int64_t(64) << 20;  // 256 MiB

  struct Hash {
    // The fingerprint is well mixed already; the products of one layout differ in the last words.
    size_t operator()(const Key& key) const {
      size_t h = key[0] | size_t(key[1]) << 32;
      for (size_t i = 7; i < key.size(); ++i) h = h * 31 + key[i];
      return h;
    }
  };

  using Item = std::pair<Key, std::shared_ptr<const Entry>>;
  std::mutex mutex_;
  std::list<Item> recent_;
  std::unordered_map<Key, std::list<Item>::iterator, Hash> index_;
  int64_t words_ = 0;
};

}  // namespace blocksparse
