// Paged attention that reads keys and values where they lie.
//
// The query heads of one KV head, for one query or several of a sequence, are the rows of a small matrix; it meets the keys of a
// tile of tokens and then their values, with the online softmax of Milakov and Gimelshein 2018 in float32. Where they are read
// once, part of what comes next is prefetched while a tile is computed with, and a pass of reads alone brings the rest of it.
//
// Each sequence is divided by itself into tasks: (KV head, ROWS rows, SPLIT tokens). Neither the number of threads nor the rest of
// the batch changes a bit of a result.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention_tile.h"
#include "vector.h"

namespace baton {

constexpr int64_t ROWS = 32;     // rows of a task
constexpr int64_t SPLIT = 512;   // tokens of a task, where all rows of a sequence and KV head fit into one
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;  // of keys read: less is done by the calling thread alone
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();  // the score of a token that a row does not see

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

// Rows [first_row, first_row + num_rows) of a sequence's (query, head of the group) pairs, and the positions they meet.
struct Task {
    int64_t seq, kv_head, first_row, num_rows, begin, end;
    int64_t partial;  // the row of the partial results that its first row goes to; -1: its result is the whole
};

// Parts of one result, in the order of their tokens.
struct Merge {
    Task task;
    int64_t num_parts;
};

inline int64_t num_queries(const Problem& p, int64_t seq) { return p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq]; }

// All queries of a sequence are in one task of each KV head and part.
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
    int64_t num_partials = 0;  // rows
    int64_t elements = 0;  // of keys that are read
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

// What one thread computes with; rows are padded_dim() apart.
struct Room {
    explicit Room(const Problem& p)
        : memory(static_cast<float*>(::operator new[](elements(p) * sizeof(float), std::align_val_t(64)))) {
        query = memory.get();
        sums = query + ROWS * p.padded_dim();
        scores = sums + ROWS * p.padded_dim();
        tile = scores + ROWS * TILE;
        for (int64_t i = 0; i < TILE; ++i) tile_offsets[i] = i * p.padded_dim();
    }
    static int64_t elements(const Problem& p) { return (2 * ROWS + TILE) * p.padded_dim() + ROWS * TILE; }

    struct Delete {
        void operator()(float* pointer) const { ::operator delete[](pointer, std::align_val_t(64)); }
    };
    std::unique_ptr<float[], Delete> memory;
    float *query, *sums, *scores, *tile;
    int64_t tile_offsets[TILE];
    float largest[ROWS], total[ROWS];
};

// What changes scores by position; those of tokens that a row does not see, and those behind the tile's last one, become -inf.
inline void adjust_scores(const Problem& p, const Task& task, Room& room, const Tile& tile, int64_t padded_count) {
    for (int64_t row = 0; row < task.num_rows; ++row) {
        float* scores = room.scores + row * TILE;
        const int64_t position = position_of(p, task, row), first = first_visible(p, position);
        for (int64_t t = 0; t < tile.count; ++t) {
            if (p.soft_cap != 0.0f) scores[t] = p.soft_cap * std::tanh(scores[t] / p.soft_cap);
            const int64_t at = tile.position_of(t);
            if (at < first || at > position) scores[t] = HIDDEN;
        }
        std::fill(scores + tile.count, scores + padded_count, HIDDEN);
    }
}

// R rows of scores -> weights exp(score - largest so far). Sums of earlier tiles are brought to the new largest by `corrections`.
template <int64_t R>
inline void soften_rows(float* scores, int64_t vectors, float* all_largest, float* totals, float* corrections) {
    Floats most[R], total[R] = {};
    for (int64_t r = 0; r < R; ++r) most[r] = load(scores + r * TILE);
    for (int64_t v = 1; v < vectors; ++v) {
        for (int64_t r = 0; r < R; ++r) most[r] = maximum(most[r], load(scores + r * TILE + v * LANES));
    }
    const Floats former = spread<R>(all_largest), largest = maximum(former, fold<R>(most, MAXIMUM));
    // While a row has seen nothing, every weight is exp(-inf - 0) = 0.
    const Floats reference = largest == splat(HIDDEN) ? Floats{} : largest;
    for (int64_t v = 0; v < vectors; ++v) {
        for (int64_t r = 0; r < R; ++r) {
            float* at = scores + r * TILE + v * LANES;
            const Floats weights = exp_below_88(load(at) - splat(reference[r * (LANES / R)]));
            store(at, weights);
            total[r] += weights;
        }
    }
    const Floats correction = exp_below_88(former - reference);
    gather<R>(all_largest, largest);
    gather<R>(corrections, correction);
    gather<R>(totals, spread<R>(totals) * correction + fold<R>(total, SUM));
}

inline void soften(const Task& task, Room& room, int64_t vectors, float* corrections) {
    const auto rows = [&]<int64_t R>(int64_t r) {
        soften_rows<R>(room.scores + r * TILE, vectors, room.largest + r, room.total + r, corrections + r);
    };
    int64_t r = 0;
    for (; r + 4 <= task.num_rows; r += 4) rows.template operator()<4>(r);
    for (; r < task.num_rows; ++r) rows.template operator()<1>(r);
}

// The tile of a task that begins at a position.
inline void find_tile(Tile& tile, const Problem& p, const Task& task, int64_t begin) {
    const int32_t* table = p.block_tables + task.seq * p.table_stride;
    // Where the first row of a block begins, relative to the cache's first one.
    const auto offset_of = [&](int64_t index) {
        const int64_t block = table[index];
        TORCH_CHECK_INDEX(
            block >= 0 && block < p.num_blocks, "block ", block, " of sequence ", task.seq,
            " does not exist: the cache has ", p.num_blocks
        );
        return block * p.cache_stride_block + task.kv_head * p.cache_stride_head;
    };
    tile.find(begin, task.end, p.block_size, p.head_dim, offset_of);
}

// `take_next` is called once, before the last tile: it returns the task that this thread goes on with, or null. READ_ONCE: no other
// task of the sequence reads the same keys. Then what comes next is prefetched, also the first tile of the task that follows.
template <bool READ_ONCE, typename T, typename TakeNext>
void attend(
    const Problem& p, const Task& task, Room& room, T* out, const T* query, const T* keys, const T* values,
    float* partials, const TakeNext& take_next
) {
    const int64_t group_size = p.group_size(), dim = p.padded_dim();
    const int64_t first_query = p.cu_seqlens_q[task.seq];
    for (int64_t row = 0; row < task.num_rows; ++row) {
        const int64_t token = first_query + (task.first_row + row) / group_size;
        const int64_t head = task.kv_head * group_size + (task.first_row + row) % group_size;
        const T* from = query + token * p.query_stride_token + head * p.query_stride_head;
        float* to = room.query + row * dim;
        std::fill(to, to + dim, 0.0f);
        for_each_vector(p.head_dim, [&](int64_t i, auto read, auto) { store(to + i, read(from + i) * p.scale); });
        room.largest[row] = -std::numeric_limits<float>::infinity();
        room.total[row] = 0.0f;
    }
    std::fill(room.sums, room.sums + task.num_rows * dim, 0.0f);

    // Rows see everything between these positions.
    const int64_t all_visible_begin = first_visible(p, position_of(p, task, task.num_rows - 1));
    const int64_t all_visible_end = position_of(p, task, 0) + 1;
    float corrections[ROWS];

    // Of bfloat16 and float16 every four rows of queries make floats anew; for more rows a tile is copied as floats.
    const bool in_place = p.head_dim == dim && (std::is_same_v<T, float> || task.num_rows <= 4);
    const auto rows_of = [](const T* cache, const Tile& tile) { return Rows<T>{cache, tile.offsets, tile.count}; };
    using NextInPlace = std::conditional_t<READ_ONCE, Next<T, 0>, NoNext<T>>;  // past L2
    using NextToCopy = std::conditional_t<READ_ONCE, Next<T, 2>, NoNext<T>>;   // into L2: L1 holds the copy
    const auto with_rows = [&](const Rows<T>& rows, const Rows<T>& next, const auto& use) {
        if (in_place) {
            touch(rows, dim);
            use(rows, NextInPlace(next, p.head_dim));
        } else {
            copy(room.tile, rows, p.head_dim, dim);
            use(Rows<float>{room.tile, room.tile_offsets, rows.count}, NextToCopy(next, p.head_dim));
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
        with_rows(key_rows, value_rows, [&](const auto& rows, const auto& to_prefetch) {
            to_prefetch.prefetch_four(0);
            score_tile(room.scores, room.query, task.num_rows, rows, to_prefetch, dim);
            to_prefetch.prefetch_four(1);
        });
        const bool partly_hidden =
            tile.begin < all_visible_begin || tile.end > all_visible_end || tile.count < vectors * LANES;
        if (partly_hidden || p.soft_cap != 0.0f) {
            adjust_scores(p, task, room, tile, vectors * LANES);
        }
        soften(task, room, vectors, corrections);
        const Tile& same_or_whole = next.count == TILE ? next : tile;  // computing with a tile asks for as many rows
        with_rows(value_rows, rows_of(keys, same_or_whole), [&](const auto& rows, const auto& to_prefetch) {
            to_prefetch.prefetch_four(0);
            add_tile(room.sums, corrections, room.scores, task.num_rows, rows, to_prefetch, dim);
        });
    } while (tile.end < task.end);

    for (int64_t row = 0; row < task.num_rows; ++row) {
        const float* sums = room.sums + row * dim;
        if (task.partial >= 0) {
            float* part = partials + (task.partial + row) * (dim + 2);
            std::copy(sums, sums + dim, part);
            part[dim] = room.largest[row];
            part[dim + 1] = room.total[row];
            continue;
        }
        const int64_t token = first_query + (task.first_row + row) / group_size;
        const int64_t head = task.kv_head * group_size + (task.first_row + row) % group_size;
        T* to = out + token * p.out_stride_token + head * p.out_stride_head;
        const float factor = 1.0f / room.total[row];
        for_each_vector(p.head_dim, [&](int64_t i, auto, auto write) { write(to + i, load(sums + i) * factor); });
    }
}

// Brings the parts of a result to the largest score of all, and adds them.
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

// Queries of a sequence of length 0, padding of a batch, attend to nothing.
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
    // Whoever is free takes the next task.
    const auto take = [&]() -> const Task* {
        const int64_t task = num_taken++;
        return task < num_tasks ? &work.tasks[task] : nullptr;
    };
    // The last ones nobody takes ahead: another thread may be free for them.
    const auto take_ahead = [&] { return num_taken + num_threads < num_tasks ? take() : nullptr; };
    const auto run_tasks = [&](int64_t, int64_t) {
        Room room(p);
        for (const Task* task = take(); task != nullptr;) {
            const Task* next = nullptr;
            const auto take_next = [&] { return next = take_ahead(); };
            if (fits_one_task(p, task->seq)) {
                attend<true>(p, *task, room, out, query, keys, values, partials.get(), take_next);
            } else {
                attend<false>(p, *task, room, out, query, keys, values, partials.get(), take_next);
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
