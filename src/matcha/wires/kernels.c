/* Modulo messages on a CPU: rotation, grid, checks and packing of blocks of 256 float32.

   What src/matcha/wires/modulo.py does with torch, several times as fast: a block stays in the
   nearest cache from the first operation to the last. The file includes itself once for each kind
   of processor, which differ in how many numbers a vector has; the right one is chosen when a
   function is called. matcha/wires/library.py compiles and loads it. */

#ifndef LANES

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define ORDERS 8
#define ROUNDING 12582912.0f /* 3 * 2^22: float32 around it are whole numbers */

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define NAME(name) JOIN(name, VARIANT)

/* What a modulo wire is: of how many bits, its grid's step per scale and what else `Modulo` has. */
struct matcha_wire {
    int bits;
    float ratio, shift, widening, trust, finest;
};

/* One end of a link in a simulation: its values, where it moves to, its scales. */
struct matcha_end {
    const float *base;
    float *out;
    const float *sent;
    float *seen, *finest;
    float weight;
};

/* Which order of weights a block's check has: by its link's scale, which both ends know. */
static inline const int16_t *weights_of(const int16_t *weights, float common) {
    uint32_t bits;
    memcpy(&bits, &common, sizeof bits);
    return weights + BLOCK * ((bits >> 16) % ORDERS);
}

#if defined(__x86_64__)
#define LANES 16
#define VARIANT avx512
#define TARGET                                                                                     \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#include "kernels.c"
#define LANES 8
#define VARIANT avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "kernels.c"
#endif
#define LANES 4
#define VARIANT plain
#define TARGET
#include "kernels.c"

/* Vectors have at most so many numbers; what they compute is the same. Tests try every kind. */
static int most_lanes = 16;
void matcha_limit_lanes(int most) { most_lanes = most; }

#if defined(__x86_64__)
static int has_lanes(int lanes) {
    if (lanes > most_lanes || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    return lanes == 8 ||
           (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl"));
}
#define CALL(name, ...)                                                                            \
    (has_lanes(16)  ? name##_avx512(__VA_ARGS__)                                                   \
     : has_lanes(8) ? name##_avx2(__VA_ARGS__)                                                     \
                    : name##_plain(__VA_ARGS__))
#else
#define CALL(name, ...) name##_plain(__VA_ARGS__)
#endif

/* Turn blocks of values into whole numbers modulo 2^bits, in the upper bits of a byte each
   (`residues`), packed as well (`packed`), with their checks and the blocks' lengths. */
void matcha_encode(const float *values, size_t number, const float *common, float ratio,
                   float shift, int lower, const float *signs, const int16_t *weights, int bits,
                   uint8_t *residues, uint8_t *packed, int32_t *checks, float *lengths) {
    CALL(encode, values, number, common, ratio, shift, lower, signs, weights, bits, residues,
         checks, lengths);
    CALL(pack, residues, number * BLOCK, bits, packed);
}

/* Both ends' residues subtracted (`raised`), upper minus lower end; per block the weighted sum of
   the differences, and the length of the differences plus `shift`: exact, but for its root. */
void matcha_compare(const uint8_t *packed, const uint8_t *residues, size_t number,
                    const float *common, int shift, const int16_t *weights, int bits, int lower,
                    uint8_t *raised, int32_t *sums, float *lengths) {
    CALL(unpack, packed, number * BLOCK, bits, raised);
    CALL(compare, residues, number, common, shift, weights, lower, raised, sums, lengths);
}

/* Add `weight` times the differences plus `shift`, in steps and rotated back, to the values. */
void matcha_move(const int8_t *raised, size_t number, int shift, const float *steps,
                 const float *signs, float weight, float *values) {
    CALL(move, raised, number, shift, steps, signs, weight, values);
}

/* Meet in all blocks: the simulator's twin of encoding, comparing and moving at both ends. */
void matcha_meet(const struct matcha_wire *wire, const float *signs, const int16_t *weights,
                 size_t number, const int32_t *filled, const struct matcha_end *ends) {
    CALL(meet, wire, signs, weights, number, filled, ends);
}

#else /* once for each kind of processor */

typedef float NAME(vector) __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t NAME(lanes) __attribute__((vector_size(4 * LANES)));

/* One stage of the Hadamard transform inside a vector: lanes whose numbers differ in one bit. */
#if defined(__clang__)
#define EXCHANGE4(v, s) __builtin_shufflevector(v, v, 0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s)
#define EXCHANGE8(v, s)                                                                            \
    __builtin_shufflevector(v, v, 0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s)
#define EXCHANGE16(v, s)                                                                           \
    __builtin_shufflevector(v, v, 0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s, 8 ^ s,   \
                            9 ^ s, 10 ^ s, 11 ^ s, 12 ^ s, 13 ^ s, 14 ^ s, 15 ^ s)
#else
#define EXCHANGE4(v, s) __builtin_shuffle(v, (NAME(lanes)){0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s})
#define EXCHANGE8(v, s)                                                                            \
    __builtin_shuffle(                                                                             \
        v, (NAME(lanes)){0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s})
#define EXCHANGE16(v, s)                                                                           \
    __builtin_shuffle(v, (NAME(lanes)){0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s,     \
                                       8 ^ s, 9 ^ s, 10 ^ s, 11 ^ s, 12 ^ s, 13 ^ s, 14 ^ s,       \
                                       15 ^ s})
#endif
#define EXCHANGE JOINED(EXCHANGE, LANES)
#define JOINED(a, b) JOINED2(a, b)
#define JOINED2(a, b) a##b

/* The Hadamard transform of 256 numbers, not scaled: H X H for a block seen as a square X. */
TARGET static inline __attribute__((always_inline)) void NAME(turn)(float *block) {
    NAME(vector) *v = (NAME(vector) *)block;
    enum { COUNT = BLOCK / LANES };
    static const float odd[] = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
    static const float pairs[] = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
    NAME(vector) sign1, sign2;
    memcpy(&sign1, odd, sizeof sign1);
    memcpy(&sign2, pairs, sizeof sign2);
#if LANES >= 8
    static const float fours[] = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
    NAME(vector) sign4;
    memcpy(&sign4, fours, sizeof sign4);
#endif
#if LANES >= 16
    static const float eights[] = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
    NAME(vector) sign8;
    memcpy(&sign8, eights, sizeof sign8);
#endif
    for (int k = 0; k < COUNT; k++) {
        NAME(vector) x = v[k];
        x = EXCHANGE(x, 1) + sign1 * x;
        x = EXCHANGE(x, 2) + sign2 * x;
#if LANES >= 8
        x = EXCHANGE(x, 4) + sign4 * x;
#endif
#if LANES >= 16
        x = EXCHANGE(x, 8) + sign8 * x;
#endif
        v[k] = x;
    }
    /* Two stages between vectors at a time: half as much goes through memory. */
    for (int h = 1; h < COUNT; h *= 4)
        for (int k = 0; k < COUNT; k++) {
            if (k & h || k & (2 * h)) continue;
            NAME(vector) a = v[k] + v[k + h], b = v[k] - v[k + h];
            if (2 * h == COUNT) {
                v[k] = a, v[k + h] = b;
                continue;
            }
            NAME(vector) c = v[k + 2 * h] + v[k + 3 * h], d = v[k + 2 * h] - v[k + 3 * h];
            v[k] = a + c, v[k + 2 * h] = a - c;
            v[k + h] = b + d, v[k + 3 * h] = b - d;
        }
}

/* One block's residues and length; returns its check. Weights are odd, and a check of numbers that
   wrapped is off by a multiple of 4 or more: where a number is none, or beyond 2^31, the check is
   off by 1 at the lower end and by 2 at the upper, so that it can never hold, whoever is met. */
TARGET static inline __attribute__((always_inline)) int32_t NAME(encode_block)(
    const float *x, float common, float ratio, float shift, int lower, const float *signs,
    const int16_t *weights, int bits, uint8_t *restrict residues, float *length) {
    float y[BLOCK] __attribute__((aligned(64)));
    int32_t whole[BLOCK] __attribute__((aligned(64)));
    float step = common * ratio, parts[16] = {0}, square = 0;
    uint32_t check = 0, lost = 0;
    for (int k = 0; k < BLOCK; k++) y[k] = x[k] * signs[k];
    NAME(turn)(y);
    for (int k = 0; k < BLOCK; k += 16)
        for (int j = 0; j < 16; j++) parts[j] += y[k + j] * y[k + j];
    for (int j = 0; j < 16; j++) square += parts[j];
    *length = sqrtf(square);
    if (*length < step * (ROUNDING / 4)) {
        /* Adding 3 * 2^22 rounds, and leaves the number in the lower bits of a float. What
           stands above it changes neither residue nor check: see `modulo.whole_numbers`. */
        for (int k = 0; k < BLOCK; k++) y[k] = (y[k] / step - shift) + ROUNDING;
        memcpy(whole, y, sizeof whole);
    } else
        for (int k = 0; k < BLOCK; k++) {
            float n = rintf(y[k] / step - shift);
            int fits = fabsf(n) < 2147483648.0f;
            whole[k] = fits ? (int32_t)n : INT32_MIN;
            lost |= !fits;
        }
    const int16_t *weight = weights_of(weights, common);
    for (int k = 0; k < BLOCK; k++) check += (uint32_t)whole[k] * (uint32_t)weight[k];
    for (int k = 0; k < BLOCK; k++) residues[k] = (uint8_t)((uint32_t)whole[k] << (8 - bits));
    return (int32_t)(check + (lower ? lost : 2 * lost));
}

TARGET static void NAME(encode)(const float *values, size_t number, const float *common,
                                float ratio, float shift, int lower, const float *signs,
                                const int16_t *weights, int bits, uint8_t *restrict residues,
                                int32_t *restrict checks, float *restrict lengths) {
    for (size_t b = 0; b < number; b++)
        checks[b] = NAME(encode_block)(values + b * BLOCK, common[b], ratio, shift, lower, signs,
                                       weights, bits, residues + b * BLOCK, lengths + b);
}

/* The layout is that of packing.py: a vector's parts laid over one another. */
TARGET static void NAME(pack)(const uint8_t *r, size_t size, int bits, uint8_t *restrict out) {
    if (bits == 8) memcpy(out, r, size);
    size_t part = size * (size_t)bits / 8;
    if (bits == 4)
        for (size_t k = 0; k < part; k++) out[k] = r[k] | r[part + k] >> 4;
    if (bits == 2)
        for (size_t k = 0; k < part; k++)
            out[k] = r[k] | r[part + k] >> 2 | r[2 * part + k] >> 4 | r[3 * part + k] >> 6;
    if (bits == 3) {
        part = size / 8;
        for (size_t k = 0; k < part; k++) {
            uint8_t third = r[2 * part + k], sixth = r[5 * part + k];
            out[k] = r[k] | r[part + k] >> 3 | third >> 6;
            out[part + k] = r[3 * part + k] | r[4 * part + k] >> 3 | sixth >> 6;
            out[2 * part + k] = r[6 * part + k] | r[7 * part + k] >> 3 | (third & 0x20) >> 4 |
                                (sixth & 0x20) >> 5;
        }
    }
}

TARGET static void NAME(unpack)(const uint8_t *packed, size_t size, int bits,
                                uint8_t *restrict r) {
    if (bits == 8) memcpy(r, packed, size);
    size_t part = size * (size_t)bits / 8;
    if (bits == 4)
        for (size_t k = 0; k < part; k++)
            r[k] = packed[k] & 0xf0, r[part + k] = (uint8_t)(packed[k] << 4);
    if (bits == 2)
        for (size_t k = 0; k < part; k++) {
            uint8_t p = packed[k];
            r[k] = p & 0xc0, r[part + k] = (uint8_t)(p << 2) & 0xc0;
            r[2 * part + k] = (uint8_t)(p << 4) & 0xc0, r[3 * part + k] = (uint8_t)(p << 6);
        }
    if (bits == 3) {
        part = size / 8;
        for (size_t k = 0; k < part; k++) {
            uint8_t p = packed[k], q = packed[part + k], s = packed[2 * part + k];
            r[k] = p & 0xe0, r[part + k] = (uint8_t)(p << 3) & 0xe0;
            r[2 * part + k] = (uint8_t)((p << 6 & 0xc0) | (s << 4 & 0x20));
            r[3 * part + k] = q & 0xe0, r[4 * part + k] = (uint8_t)(q << 3) & 0xe0;
            r[5 * part + k] = (uint8_t)((q << 6 & 0xc0) | (s << 5 & 0x20));
            r[6 * part + k] = s & 0xe0, r[7 * part + k] = (uint8_t)(s << 3) & 0xe0;
        }
    }
}

/* The difference of one block, in place of the partner's residues; returns its weighted sum. */
TARGET static inline __attribute__((always_inline)) int32_t NAME(compare_block)(
    const uint8_t *mine, float common, int shift, const int16_t *weights, int lower,
    uint8_t *restrict theirs, float *length) {
    const int16_t *weight = weights_of(weights, common);
    uint8_t flip = lower ? 0 : 0xff;
    int16_t wide[BLOCK];
    int32_t sum = 0, square = 0;
    /* Minus n is the bits of n turned over, plus one. */
    for (int k = 0; k < BLOCK; k++)
        theirs[k] = (uint8_t)(((uint8_t)(theirs[k] - mine[k]) ^ flip) - flip);
    for (int k = 0; k < BLOCK; k++) wide[k] = (int8_t)theirs[k];
    for (int k = 0; k < BLOCK; k++) sum += wide[k] * weight[k];
    for (int k = 0; k < BLOCK; k++) wide[k] = (int16_t)(wide[k] + shift);
    for (int k = 0; k < BLOCK; k++) square += wide[k] * wide[k];
    *length = sqrtf((float)square);
    return sum;
}

TARGET static void NAME(compare)(const uint8_t *residues, size_t number, const float *common,
                                 int shift, const int16_t *weights, int lower,
                                 uint8_t *restrict raised, int32_t *restrict sums,
                                 float *restrict lengths) {
    for (size_t b = 0; b < number; b++)
        sums[b] = NAME(compare_block)(residues + b * BLOCK, common[b], shift, weights, lower,
                                      raised + b * BLOCK, lengths + b);
}

/* A difference rotated back, in the unit of its whole numbers. */
TARGET static inline __attribute__((always_inline)) void NAME(turn_back)(const int8_t *k8,
                                                                         int shift,
                                                                         const float *signs,
                                                                         float *y) {
    for (int k = 0; k < BLOCK; k++) y[k] = (float)(k8[k] + shift);
    /* Exact: 256 whole numbers of at most eight bits. Both ends find the same, in any order. */
    NAME(turn)(y);
    for (int k = 0; k < BLOCK; k++) y[k] *= signs[k];
}

TARGET static void NAME(move)(const int8_t *raised, size_t number, int shift, const float *steps,
                              const float *signs, float weight, float *restrict values) {
    float y[BLOCK] __attribute__((aligned(64)));
    for (size_t b = 0; b < number; b++) {
        float *x = values + b * BLOCK, step = steps[b];
        NAME(turn_back)(raised + b * BLOCK, shift, signs, y);
        for (int k = 0; k < BLOCK; k++) {
            float difference = y[k] * step;
            x[k] = x[k] + difference * weight;
        }
    }
}

TARGET static void NAME(meet)(const struct matcha_wire *wire, const float *signs,
                              const int16_t *weights, size_t number, const int32_t *filled,
                              const struct matcha_end *ends) {
    const struct matcha_end *low = ends, *up = ends + 1;
    float y[BLOCK] __attribute__((aligned(64))), length, lengths[2];
    uint8_t mine[BLOCK], theirs[BLOCK];
    const int lowest = 8 - wire->bits, shift = (int)(wire->shift * (float)(1 << lowest));
    for (size_t b = 0; b < number; b++) {
        float common = fmaxf(low->sent[b], up->sent[b]), step = common * wire->ratio;
        int32_t check = NAME(encode_block)(low->base + b * BLOCK, common, wire->ratio, 0, 1,
                                           signs, weights, wire->bits, mine, lengths);
        int32_t apart = NAME(encode_block)(up->base + b * BLOCK, common, wire->ratio, wire->shift,
                                           0, signs, weights, wire->bits, theirs, lengths + 1);
        apart = (int32_t)((uint32_t)apart - (uint32_t)check);
        int known = isfinite(lengths[0]) && isfinite(lengths[1]);
        int32_t sum = NAME(compare_block)(mine, common, shift, weights, 1, theirs, &length);
        int holds = apart == sum >> lowest;
        length = length / (float)(1 << lowest);
        float square = length * length / BLOCK, coarse = 1 - 1 / (square * 6), share, seen;
        coarse = coarse > 0 ? coarse : 0;
        /* `modulo.seen_scales` and `modulo.shrinkage` say why. */
        if (holds)
            seen = sqrtf(fmaxf(square - 1.0f / 6, 0)) * step;
        else
            seen = fmaxf(common * wire->widening,
                         known ? fabsf((float)apart) * (step * wire->trust) : 0);
        if (wire->shift != 0)
            share = fminf(coarse, sqrtf(fmaxf(square - 0.25f, 0)) * 2.5f);
        else
            share = fmaxf(coarse, fminf(square * 1.57079632679489662f, 0.5f));
        step = holds ? step / (float)(1 << lowest) * sqrtf(share) : 0;
        NAME(turn_back)((const int8_t *)theirs, shift, signs, y);
        for (int k = 0; k < BLOCK; k++) y[k] *= step;
        for (int e = 0; e < 2; e++) {
            float *x = ends[e].out + b * BLOCK, weight = ends[e].weight;
            float finest = isfinite(lengths[e]) ? lengths[e] * wire->finest : 0;
            ends[e].seen[b] = fmaxf(ends[e].seen[b], seen);
            ends[e].finest[b] = fmaxf(ends[e].finest[b], finest);
            /* Padding is zero and stays zero, though a rotated message moves it too. */
            for (int k = 0; k < filled[b]; k++) x[k] = x[k] + y[k] * weight;
        }
    }
}

#undef LANES
#undef VARIANT
#undef TARGET
#undef EXCHANGE4
#undef EXCHANGE8
#undef EXCHANGE16
#undef EXCHANGE
#undef JOINED
#undef JOINED2
#endif
