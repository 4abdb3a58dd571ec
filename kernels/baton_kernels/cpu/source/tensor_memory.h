// Memory of weights and of large results, which starts at a huge page.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <list>
#include <mutex>

namespace baton {
namespace {

using at::Tensor;

// Memory that starts at a huge page.
struct HugePages {
    static constexpr size_t SIZE = 2 << 20;

    char *mapped, *data;
    size_t nbytes;  // from `data` on

    // Maps at least nbytes. The rest after the last whole huge page has small pages, unless it
    // almost fills a huge page.
    static HugePages map(size_t nbytes) {
        if (nbytes % SIZE > SIZE / 8 * 7) nbytes = (nbytes + SIZE - 1) / SIZE * SIZE;
        char* const mapped = static_cast<char*>(
            mmap(nullptr, nbytes + SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        );
        TORCH_CHECK(mapped != MAP_FAILED, "no memory for a tensor of ", nbytes, " bytes: ", strerror(errno));
        char* const data = mapped + -reinterpret_cast<uintptr_t>(mapped) % SIZE;
        madvise(data, nbytes, MADV_HUGEPAGE);  // may be refused
        return {mapped, data, nbytes};
    }

    void unmap() const { munmap(mapped, nbytes + SIZE); }
};

size_t nbytes_of(at::IntArrayRef shape, const at::TensorOptions& options) {
    return c10::multiply_integers(shape) * options.dtype().itemsize();
}

// Allocates a weight for reading at the speed of memory. A product reads more small pages than the
// processor's TLB holds.
Tensor empty_weight(at::IntArrayRef shape, const at::TensorOptions& options) {
    const size_t nbytes = nbytes_of(shape, options);
    if (nbytes < HugePages::SIZE / 8 * 7) return at::empty(shape, options);
    const HugePages pages = HugePages::map(nbytes);
    return at::from_blob(pages.data, shape, [=](void*) { pages.unmap(); }, options);
}

// Keeps the memory of freed results of operations for later results. malloc keeps no block of
// 32 MiB or more, so each layer of a long prompt would write to fresh pages. Keeps nothing before
// the process sets a maximum.
class FreedResults {
  public:
    static constexpr size_t MIN_NBYTES = 32 << 20;

    static FreedResults& instance() {
        static FreedResults& results = *new FreedResults;  // outlives all tensors
        return results;
    }

    // Returns kept memory of at least nbytes and at most 2 * nbytes. If there is none, maps memory.
    HugePages take(size_t nbytes) {
        const std::lock_guard lock(mutex_);
        auto best = kept_.end();
        for (auto one = kept_.begin(); one != kept_.end(); ++one) {
            if (one->nbytes < nbytes || one->nbytes > 2 * nbytes) continue;
            if (best == kept_.end() || one->nbytes < best->nbytes) best = one;
        }
        return best == kept_.end() ? HugePages::map(nbytes) : remove(best);
    }

    void keep(const HugePages& pages) {
        const std::lock_guard lock(mutex_);
        if (pages.nbytes > max_kept_nbytes_) return pages.unmap();
        kept_.push_back(pages);
        kept_nbytes_ += pages.nbytes;
        unmap_until(max_kept_nbytes_);
    }

    void set_max_kept(size_t nbytes) {
        const std::lock_guard lock(mutex_);
        max_kept_nbytes_ = nbytes;
        unmap_until(nbytes);
    }

    void unmap_all() {
        const std::lock_guard lock(mutex_);
        unmap_until(0);
    }

  private:
    void unmap_until(size_t max_nbytes) {
        while (kept_nbytes_ > max_nbytes) remove(kept_.begin()).unmap();
    }

    HugePages remove(std::list<HugePages>::iterator one) {
        const HugePages pages = *one;
        kept_nbytes_ -= pages.nbytes;
        kept_.erase(one);
        return pages;
    }

    std::mutex mutex_;
    std::list<HugePages> kept_;  // the first one was freed first
    size_t kept_nbytes_ = 0, max_kept_nbytes_ = 0;
};

Tensor empty_result(at::IntArrayRef shape, const at::TensorOptions& options) {
    const size_t nbytes = nbytes_of(shape, options);
    if (nbytes < FreedResults::MIN_NBYTES) return at::empty(shape, options);
    const HugePages pages = FreedResults::instance().take(nbytes);
    return at::from_blob(pages.data, shape, [=](void*) { FreedResults::instance().keep(pages); }, options);
}

}  // namespace
}  // namespace baton
