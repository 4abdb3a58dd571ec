// Paged attention that reads keys and values in place.
//
// The query heads of one KV head, for one or more queries of a sequence, are the rows of a small
// matrix. The matrix is multiplied by the keys of a tile of tokens. The softmax weights of the
// products are multiplied by the values of the tile. The softmax is the online softmax of Milakov
// and Gimelshein 2018, in float32. If keys are read only once, part of the next tile is prefetched
// during the computation, and a pass of plain reads loads the rest.
//
// Each sequence is divided into tasks (KV head, ROWS rows, SPLIT tokens) independently of the
// batch. So the bits of a result depend neither on the number of threads nor on the other
// sequences of the batch.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention_bf16.h"
#include "attention_tile.h"
#include "vector.h"

namespace baton {

constexpr int64_t ROWS = 64;  // maximum number of rows of a task
// Maximum number of tokens of a task, if one task has all rows of a sequence and KV head.
constexpr int64_t SPLIT = 512;
// If a call reads fewer key elements than this number, one thread does all work.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;
// Score of a token that a row does not attend to.
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

struct Problem {
    int64_t num_tokens, num_seqs, num_heads, num_kv_heads, num_blocks, block_size, head_dim;
    int64_t query_stride_token, query_stride_head, out_stride_token, out_stride_head;
    int64_t cache_stride_block, cache_stride_head, table_stride, table_length;
    const int32_t *block_tables, *cu_seqlens_q, *seq_lens;
    float scale;
    int64_t window = 0;      // 0: none
    float soft_cap = 0.0f;   // 0: none

    int64_t group_size() const { return num_heads / num_kv_heads; }
    int64_t padded_dim() const { return (head_dim + LANES - 1) / LANES * LANES; }
};

// A unit of work of one thread: some rows of a sequence over the key positions [begin, end). A row
// is a pair of a query and a head of the KV head's group.
struct Task {
    int64_t seq, kv_head, first_row, num_rows, begin, end;
    // Row at which the task's results begin in the partial results. -1: the task has all keys of
    // its rows, so its result is final.
    int64_t partial;
};

// Partial results of the same rows, in the order of the tokens. They are merged into one result.
struct Merge {
    Task task;
    int64_t num_parts;
};

inline int64_t num_queries(const Problem& p, int64_t seq) { return p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq]; }

// Returns whether all queries of a sequence fit into one task, for each KV head and part.
inline bool fits_one_task(const Problem& p, int64_t seq) { return num_queries(p, seq) * p.group_size() <= ROWS; }

inline int64_t position_of(const Problem& p, const Task& task, int64_t row) {
    return p.seq_lens[task.seq] - num_queries(p, task.seq) + (task.first_row + row) / p.group_size();
}

inline int64_t first_visible(const Problem& p, int64_t position) {
    return p.window == 0 ? 0 : std::max<int64_t>(0, position - p.window + 1);
}

struct Work {
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    int64_t num_partials = 0;  // number of rows of partial results
    int64_t elements = 0;  // number of key elements to read
};

inline Work divide(const Problem& p) {
    Work work;
    for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
        const int64_t first = p.cu_seqlens_q[seq], last = p.cu_seqlens_q[seq + 1];
        TORCH_CHECK_VALUE(
            0 <= first && first <= last && last <= p.num_tokens,
            "cu_seqlens_q gives sequence ", seq, " the queries from ", first, " to ", last, ", but there are ", p.num_tokens
        );
        if (p.seq_lens[seq] == 0) continue;
        TORCH_CHECK_VALUE(
            p.seq_lens[seq] >= last - first && p.seq_lens[seq] <= p.table_length * p.block_size,
            "sequence ", seq, " has ", p.seq_lens[seq], " tokens, ", last - first, " of them queries, and ",
            p.table_length, " blocks of ", p.block_size
        );
        const int64_t rows = (last - first) * p.group_size();
        for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
            for (int64_t first_row = 0; first_row < rows; first_row += ROWS) {
                Task task{seq, kv_head, first_row, std::min(ROWS, rows - first_row), 0, 0, -1};
                const int64_t begin = first_visible(p, position_of(p, task, 0));
                const int64_t end = position_of(p, task, task.num_rows - 1) + 1;
                work.elements += (end - begin) * p.head_dim;
                const int64_t split = fits_one_task(p, seq) ? SPLIT : end;
                const int64_t parts = (end - 1) / split - begin / split + 1;
                if (parts > 1) {
                    task.partial = work.num_partials;
                    work.merges.push_back({task, parts});
                    work.num_partials += parts * task.num_rows;
                }
                for (int64_t part = begin / split; part * split < end; ++part) {
                    task.begin = std::max(begin, part * split);
                    task.end = std::min(end, (part + 1) * split);
                    work.tasks.push_back(task);
                    if (parts > 1) task.partial += task.num_rows;
                }
            }
        }
    }
    return work;
}

// Scratch memory of one thread. Rows of scores are TILE elements apart. All other rows are
// padded_dim() elements apart.
struct Scratch {
    explicit Scratch(const Problem& p)
        : memory(static_cast<float*>(::operator new[](elements(p) * sizeof(float), std::align_val_t(64)))) {
        query = memory.get();
        sums = query + ROWS * p.padded_dim();
        scores = sums + ROWS * p.padded_dim();
        products = scores + ROWS * TILE;
        tile = products + ROWS * p.padded_dim();
        rounded = reinterpret_cast<BFloat16*>(tile + TILE * p.padded_dim());
        for (int64_t i = 0; i < TILE; ++i) tile_offsets[i] = i * p.padded_dim();
    }
    static int64_t elements(const Problem& p) { return (3 * ROWS + TILE) * p.padded_dim() + 2 * ROWS * TILE; }

    struct Delete {
        void operator()(float* pointer) const { ::operator delete[](pointer, std::align_val_t(64)); }
    };
    std::unique_ptr<float[], Delete> memory;
    float *query, *sums, *scores, *products, *tile;
    BFloat16* rounded;
    BFloat16* query_bf16() const { return reinterpret_cast<BFloat16*>(query); }
    BFloat16* packed_tile() const { return reinterpret_cast<BFloat16*>(tile); }

    int64_t tile_offsets[TILE];
    float largest[ROWS], total[ROWS];
};

// Applies the soft cap. Sets scores to -inf for padding and for tokens that a row does not attend
// to.
inline void adjust_scores(const Problem& p, const Task& task, Scratch& scratch, const Tile& tile, int64_t padded_count) {
    int32_t positions[TILE];
    for (int64_t t = 0; t < padded_count; ++t) {
        // Padding gets a position past all rows, so no row attends to it.
        positions[t] = t < tile.count ? static_cast<int32_t>(tile.position_of(t)) : std::numeric_limits<int32_t>::max();
    }
    for (int64_t row = 0; row < task.num_rows; ++row) {
        float* const scores = scratch.scores + row * TILE;
        if (p.soft_cap != 0.0f) {
            for (int64_t t = 0; t < tile.count; ++t) scores[t] = p.soft_cap * std::tanh(scores[t] / p.soft_cap);
        }
        const int64_t position = position_of(p, task, row);
        const Ints last = Ints{} + static_cast<int32_t>(position);
        const Ints first = Ints{} + static_cast<int32_t>(first_visible(p, position));
        for (int64_t t = 0; t < padded_count; t += LANES) {
            const Ints at = read_as<Ints>(positions + t);
            const Floats value = load(scores + t);
            store(scores + t, (at < first) | (at > last) ? splat(HIDDEN) : value);
        }
    }
}

// Replaces R rows of scores by weights exp(score - largest score so far). Writes `corrections`, by
// which the sums of earlier tiles are rescaled to the new maximum.
template <int64_t R>
inline void softmax_rows(float* scores, int64_t vectors, float* all_largest, float* totals, float* corrections) {
    Floats most[R], total[R] = {};
    for (int64_t r = 0; r < R; ++r) most[r] = load(scores + r * TILE);
    for (int64_t v = 1; v < vectors; ++v) {
        for (int64_t r = 0; r < R; ++r) most[r] = maximum(most[r], load(scores + r * TILE + v * LANES));
    }
    const Floats previous = spread<R>(all_largest), largest = maximum(previous, fold<R>(most, MAXIMUM));
    // For a row without a visible key so far, each weight is exp(-inf - 0) = 0.
    const Floats reference = largest == splat(HIDDEN) ? Floats{} : largest;
    for (int64_t v = 0; v < vectors; ++v) {
        for (int64_t r = 0; r < R; ++r) {
            float* at = scores + r * TILE + v * LANES;
            const Floats weights = exp_below_88(load(at) - splat(reference[r * (LANES / R)]));
            store(at, weights);
            total[r] += weights;
        }
    }
    const Floats correction = exp_below_88(previous - reference);
    gather<R>(all_largest, largest);
    gather<R>(corrections, correction);
    gather<R>(totals, spread<R>(totals) * correction + fold<R>(total, SUM));
}

inline void softmax_tile(const Task& task, Scratch& scratch, int64_t vectors, float* corrections) {
    const auto rows = [&]<int64_t R>(int64_t r) {
        softmax_rows<R>(scratch.scores + r * TILE, vectors, scratch.largest + r, scratch.total + r, corrections + r);
    };
    int64_t r = 0;
    for (; r + 4 <= task.num_rows; r += 4) rows.template operator()<4>(r);
    for (; r < task.num_rows; ++r) rows.template operator()<1>(r);
}

// Sets `tile` to the tile of a task that begins at position `begin`.
inline void find_tile(Tile& tile, const Problem& p, const Task& task, int64_t begin) {
    const int32_t* table = p.block_tables + task.seq * p.table_stride;
    // Offset of a block's first row in the cache.
    const auto offset_of = [&](int64_t index) {
        const int64_t block = table[index];
        TORCH_CHECK_INDEX(
            block >= 0 && block < p.num_blocks, "block ", block, " of sequence ", task.seq,
            " does not exist: the cache's number of blocks is ", p.num_blocks
        );
        return block * p.cache_stride_block + task.kv_head * p.cache_stride_head;
    };
    tile.find(begin, task.end, p.block_size, p.head_dim, offset_of);
}

// Runs one task. `take_next` returns the thread's next task or null, and is called once, before the
// last tile. READ_ONCE: no other task reads the same keys, so the next tile is prefetched,
// including the first tile of the next task.
template <bool READ_ONCE, typename T, typename TakeNext>
void attend(
    const Problem& p, const Task& task, Scratch& scratch, T* out, const T* query, const T* keys, const T* values,
    float* partials, const TakeNext& take_next
) {
    const int64_t group_size = p.group_size(), dim = p.padded_dim();
    const int64_t first_query = p.cu_seqlens_q[task.seq];
    const bool in_bf16 = uses_bf16_products<T>(task.num_rows, p.head_dim);
    for (int64_t row = 0; row < task.num_rows; ++row) {
        const int64_t token = first_query + (task.first_row + row) / group_size;
        const int64_t head = task.kv_head * group_size + (task.first_row + row) % group_size;
        const T* from = query + token * p.query_stride_token + head * p.query_stride_head;
        if (in_bf16) {
            std::memcpy(static_cast<void*>(scratch.query_bf16() + row * dim), from, dim * sizeof(BFloat16));
        } else {
            float* to = scratch.query + row * dim;
            std::fill(to, to + dim, 0.0f);
            for_each_vector(p.head_dim, [&](int64_t i, auto read, auto) { store(to + i, read(from + i) * p.scale); });
        }
        scratch.largest[row] = -std::numeric_limits<float>::infinity();
        scratch.total[row] = 0.0f;
    }
    std::fill(scratch.sums, scratch.sums + task.num_rows * dim, 0.0f);

    // Every row attends to all tokens between these positions.
    const int64_t all_visible_begin = first_visible(p, position_of(p, task, task.num_rows - 1));
    const int64_t all_visible_end = position_of(p, task, 0) + 1;
    float corrections[ROWS];

    // If bfloat16 and float16 are read in place, they are converted once per four rows of queries.
    // For more than four rows, the tile is converted once into a copy.
    const bool in_place = p.head_dim == dim && (std::is_same_v<T, float> || task.num_rows <= 4);
    const auto rows_of = [](const T* cache, const Tile& tile) { return Rows<T>{cache, tile.offsets, tile.count}; };
    using NextInPlace = std::conditional_t<READ_ONCE, Next<T, 0>, NoNext<T>>;  // bypasses L2
    // Prefetches into L2, because L1 has the copy.
    using NextToCopy = std::conditional_t<READ_ONCE, Next<T, 2>, NoNext<T>>;
    const auto with_rows = [&](const Rows<T>& rows, const Rows<T>& next, const auto& use) {
        if (in_place) {
            touch(rows, dim);
            use(rows, NextInPlace(next, p.head_dim));
        } else {
            copy(scratch.tile, rows, p.head_dim, dim);
            use(Rows<float>{scratch.tile, scratch.tile_offsets, rows.count}, NextToCopy(next, p.head_dim));
        }
    };
    Tile tile, next;
    find_tile(next, p, task, task.begin);
    do {
        tile = next;
        if (tile.end < task.end) {
            find_tile(next, p, task, tile.end);
        } else if (const Task* const next_task = take_next(); next_task != nullptr) {
            find_tile(next, p, *next_task, next_task->begin);
        }
        const int64_t vectors = (tile.count + LANES - 1) / LANES;
        const Rows<T> key_rows = rows_of(keys, tile), value_rows = rows_of(values, tile);
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (in_bf16) {
                pack_keys(scratch.packed_tile(), key_rows, dim);
                score_tile_bf16(
                    scratch.scores, scratch.query_bf16(), task.num_rows, scratch.packed_tile(), dim, p.scale
                );
            }
        }
        if (!in_bf16) {
            with_rows(key_rows, value_rows, [&](const auto& rows, const auto& to_prefetch) {
                to_prefetch.prefetch_four(0);
                score_tile(scratch.scores, scratch.query, task.num_rows, rows, to_prefetch, dim);
                to_prefetch.prefetch_four(1);
            });
        }
        const bool partly_hidden =
            tile.begin < all_visible_begin || tile.end > all_visible_end || tile.count < vectors * LANES;
        if (partly_hidden || p.soft_cap != 0.0f) {
            adjust_scores(p, task, scratch, tile, vectors * LANES);
        }
        softmax_tile(task, scratch, vectors, corrections);
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (in_bf16) {
                pack_values(scratch.packed_tile(), value_rows, dim, vectors * LANES);
                add_tile_bf16(
                    scratch.sums, corrections, scratch.scores, task.num_rows, scratch.packed_tile(), dim,
                    vectors * LANES, scratch.rounded, scratch.products
                );
                continue;
            }
        }
        // A `next` that is not a whole tile may have too few rows to prefetch. Then the current tile
        // is prefetched again, which has no effect.
        const Tile& same_or_whole = next.count == TILE ? next : tile;
        with_rows(value_rows, rows_of(keys, same_or_whole), [&](const auto& rows, const auto& to_prefetch) {
            to_prefetch.prefetch_four(0);
            add_tile(scratch.sums, corrections, scratch.scores, task.num_rows, rows, to_prefetch, dim);
        });
    } while (tile.end < task.end);

    for (int64_t row = 0; row < task.num_rows; ++row) {
        const float* sums = scratch.sums + row * dim;
        if (task.partial >= 0) {
            float* part = partials + (task.partial + row) * (dim + 2);
            std::copy(sums, sums + dim, part);
            part[dim] = scratch.largest[row];
            part[dim + 1] = scratch.total[row];
            continue;
        }
        const int64_t token = first_query + (task.first_row + row) / group_size;
        const int64_t head = task.kv_head * group_size + (task.first_row + row) % group_size;
        T* to = out + token * p.out_stride_token + head * p.out_stride_head;
        const float factor = 1.0f / scratch.total[row];
        for_each_vector(p.head_dim, [&](int64_t i, auto, auto write) { write(to + i, load(sums + i) * factor); });
    }
}

// Rescales the partial results to the largest score of all parts, and adds them.
template <typename T>
void merge(const Problem& p, const Merge& merge, T* out, const float* partials) {
    const int64_t group_size = p.group_size(), dim = p.padded_dim();
    const Task& task = merge.task;
    for (int64_t row = 0; row < task.num_rows; ++row) {
        const auto part = [&](int64_t i) { return partials + (task.partial + i * task.num_rows + row) * (dim + 2); };
        float largest = -std::numeric_limits<float>::infinity(), total = 0.0f;
        for (int64_t i = 0; i < merge.num_parts; ++i) largest = std::max(largest, part(i)[dim]);
        float factors[64];
        std::vector<float> many;
        float* factor = factors;
        if (merge.num_parts > 64) {
            many.resize(merge.num_parts);
            factor = many.data();
        }
        for (int64_t i = 0; i < merge.num_parts; ++i) {
            factor[i] = std::exp(part(i)[dim] - largest);
            total += factor[i] * part(i)[dim + 1];
        }
        const int64_t token = p.cu_seqlens_q[task.seq] + (task.first_row + row) / group_size;
        const int64_t head = task.kv_head * group_size + (task.first_row + row) % group_size;
        T* to = out + token * p.out_stride_token + head * p.out_stride_head;
        for_each_vector(p.head_dim, [&](int64_t at, auto, auto write) {
            Floats sums{};
            for (int64_t i = 0; i < merge.num_parts; ++i) sums += load(part(i) + at) * factor[i];
            write(to + at, sums / total);
        });
    }
}

// Writes zeros for the queries of sequences of length 0, which pad a batch.
template <typename T>
void zero_padding(const Problem& p, T* out) {
    for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
        if (p.seq_lens[seq] != 0) continue;
        for (int64_t token = p.cu_seqlens_q[seq]; token < p.cu_seqlens_q[seq + 1]; ++token) {
            for (int64_t head = 0; head < p.num_heads; ++head) {
                std::fill_n(out + token * p.out_stride_token + head * p.out_stride_head, p.head_dim, T(0.0f));
            }
        }
    }
}

template <typename T>
void paged_attention(const Problem& p, T* out, const T* query, const T* keys, const T* values) {
    const Work work = divide(p);
    const int64_t num_tasks = static_cast<int64_t>(work.tasks.size());
    std::unique_ptr<float[]> partials(
        work.num_partials == 0 ? nullptr : new float[work.num_partials * (p.padded_dim() + 2)]
    );
    const int64_t num_threads =
        work.elements < PARALLEL_ELEMENTS ? 1 : std::min<int64_t>(at::get_num_threads(), num_tasks);
    std::atomic<int64_t> num_taken{0};
    const auto take = [&]() -> const Task* {
        const int64_t task = num_taken++;
        return task < num_tasks ? &work.tasks[task] : nullptr;
    };
    // The last tasks are not taken ahead, because another thread may become free first.
    const auto take_ahead = [&] { return num_taken + num_threads < num_tasks ? take() : nullptr; };
    const auto run_tasks = [&](int64_t, int64_t) {
        Scratch scratch(p);
        for (const Task* task = take(); task != nullptr;) {
            const Task* next = nullptr;
            const auto take_next = [&] { return next = take_ahead(); };
            if (fits_one_task(p, task->seq)) {
                attend<true>(p, *task, scratch, out, query, keys, values, partials.get(), take_next);
            } else {
                attend<false>(p, *task, scratch, out, query, keys, values, partials.get(), take_next);
            }
            task = next != nullptr ? next : take();
        }
    };
    if (num_threads == 1 || at::in_parallel_region()) {
        run_tasks(0, 1);
    } else {
        at::parallel_for(0, num_threads, 1, run_tasks);
    }
    zero_padding(p, out);
    for (const Merge& one : work.merges) merge(p, one, out, partials.get());
}

}  // namespace baton
