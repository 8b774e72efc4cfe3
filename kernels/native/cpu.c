/* CPU kernels for small float32 steps, where an operator's overhead and copies cost more than its arithmetic.
 *
 * One thread, plain loops that a compiler vectorises. No allocation, no global state, no knowledge of Python.
 * R routed rows, D hidden, I expert width; B sequences, H query heads, h KV heads, G = H / h, d head dim.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define OUTPUTS 4 /* outputs of a tile: with two rows, eight independent sums hide the latency of a multiply-add */
#define TILES_AHEAD 2 /* weights come from beyond the private caches; asking early took 27 % off a decode's experts */
#define TOKENS_AHEAD 4

static inline void prefetch(const float *start, int64_t count)
{
    for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof *start)
        __builtin_prefetch(start + i);
}

/* exp(x) for x <= 0, relative error below 2e-7: 2^n times a polynomial of the rest. Vectorises, unlike expf. */
static inline float exp_negative(float x)
{
    float t = x * 1.44269504f, n, f, p;
    int32_t bits;
    t = t < -126.0f ? -126.0f : t;
    n = (float)(int32_t)(t - 0.5f);
    f = t - n;
    p = 1.0f + f * (0.693147182f + f * (0.240226463f + f * (0.0555041f + f * (0.00961812911f +
        f * (0.00133335581f + f * 0.000154035304f)))));
    bits = ((int32_t)n + 127) << 23;
    memcpy(&n, &bits, sizeof n);
    return p * n;
}

/* out[r][n] = x[r] . w[n] for `rows` (1 or 2) rows of `width` and OUTPUTS outputs */
static inline void tile(const float *x, const float *w, int rows, int64_t width, float out[2][OUTPUTS])
{
    const float *x1 = x + (rows - 1) * width;
    float a[OUTPUTS] = {0}, b[OUTPUTS] = {0};
    for (int64_t k = 0; k < width; k++)
        for (int n = 0; n < OUTPUTS; n++) {
            a[n] += x[k] * w[n * width + k];
            b[n] += x1[k] * w[n * width + k];
        }
    memcpy(out[0], a, sizeof a);
    memcpy(out[1], b, sizeof b);
}

/* y[rows, outs] = x[rows, width] @ w[outs, width].T; outs is a multiple of OUTPUTS */
static void product(const float *x, const float *w, float *y, int64_t rows, int64_t outs, int64_t width)
{
    float part[2][OUTPUTS];
    for (int64_t n = 0; n < outs; n += OUTPUTS) {
        prefetch(w + (n + TILES_AHEAD * OUTPUTS) * width, OUTPUTS * width);
        for (int64_t r = 0; r < rows; r += 2) {
            int pair = rows - r > 1 ? 2 : 1;
            tile(x + r * width, w + n * width, pair, width, part);
            for (int i = 0; i < pair; i++)
                memcpy(y + (r + i) * outs + n, part[i], sizeof part[i]);
        }
    }
}

/* `rows` rows of x times `outs` rows of w: constants once inlined, so that all sums stay in registers */
static inline __attribute__((always_inline)) void block(const float *x, const float *w, const int rows, const int outs,
                                                        int64_t width, float *y, int64_t y_stride)
{
    float sums[4][4] = {{0}};
    for (int64_t k = 0; k < width; k++)
        for (int r = 0; r < rows; r++)
            for (int n = 0; n < outs; n++)
                sums[r][n] += x[r * width + k] * w[n * width + k];
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < outs; n++)
            y[r * y_stride + n] += sums[r][n];
}

/* y[R, N] = start + x[R, K] @ w[N, K].T, where start is NULL for zeros, [R, N], or with `repeat` one row for all */
void linear(const float *x, const float *w, const float *start, int64_t repeat, int64_t R, int64_t K, int64_t N,
            float *y)
{
    int64_t n = 0;
    for (int64_t r = 0; r < R; r++)
        if (start)
            memcpy(y + r * N, repeat ? start : start + r * N, N * sizeof *y);
        else
            memset(y + r * N, 0, N * sizeof *y);
    for (; n + OUTPUTS <= N; n += OUTPUTS) {
        int64_t r = 0;
        prefetch(w + (n + TILES_AHEAD * OUTPUTS) * K, OUTPUTS * K);
        for (; r + 4 <= R; r += 4)
            block(x + r * K, w + n * K, 4, OUTPUTS, K, y + r * N + n, N);
        for (; r < R; r++)
            block(x + r * K, w + n * K, 1, OUTPUTS, K, y + r * N + n, N);
    }
    for (; n < N; n++)
        for (int64_t r = 0; r < R; r++)
            block(x + r * K, w + n * K, 1, 1, K, y + r * N + n, N);
}

/* out[d] = x[d] * weight[d] / sqrt(sum of squares + floor); out may be x */
static inline void normalise(const float *x, const float *weight, float floor, int64_t D, float *out)
{
    float sum = floor;
    for (int64_t d = 0; d < D; d++)
        sum += x[d] * x[d];
    sum = 1.0f / sqrtf(sum);
    for (int64_t d = 0; d < D; d++)
        out[d] = x[d] * sum * weight[d];
}

/* Each row of x [R, D] normalised, into out */
void rms_norm(const float *x, const float *weight, float floor, int64_t R, int64_t D, float *out)
{
    for (int64_t r = 0; r < R; r++)
        normalise(x + r * D, weight, floor, D, out + r * D);
}

/* Each of the first N heads of a row normalised with its own weight [N, d], then its interleaved pairs rotated by
 * rotation [R, d/2] (cosine, sine); in place. Rows of x are x_stride floats apart. */
void norm_and_rotate(float *x, int64_t x_stride, const float *weight, float floor, const float *rotation, int64_t R,
                     int64_t N, int64_t d)
{
    for (int64_t r = 0; r < R; r++)
        for (int64_t n = 0; n < N; n++) {
            float *head = x + r * x_stride + n * d;
            const float *turn = rotation + r * d;
            normalise(head, weight + n * d, floor, d, head);
            for (int64_t i = 0; i < d; i += 2) {
                float a = head[i], b = head[i + 1];
                head[i] = a * turn[i] - b * turn[i + 1];
                head[i + 1] = a * turn[i + 1] + b * turn[i];
            }
        }
}

/* The K best of E logits of each row, best first, and their weights: the softmax over all E logits, or with `sigmoid`
 * the sigmoid of each; with `renormalise` divided by their sum; times `scaling`. Of equal logits the first is better. */
void route_top_k(const float *logits, int64_t R, int64_t E, int64_t K, int64_t renormalise, int64_t sigmoid,
                 float scaling, int64_t *ids, float *weights)
{
    for (int64_t r = 0; r < R; r++, logits += E, ids += K, weights += K) {
        float total = sigmoid ? 1e-20f : 0;
        for (int64_t k = 0; k < K; k++) {
            int64_t best = -1;
            for (int64_t e = 0; e < E; e++) {
                int taken = 0;
                for (int64_t j = 0; j < k; j++)
                    taken |= ids[j] == e;
                if (!taken && (best < 0 || logits[e] > logits[best]))
                    best = e;
            }
            ids[k] = best;
            if (sigmoid) {
                float g = logits[best], m = exp_negative(g < 0 ? g : -g);
                weights[k] = (g < 0 ? m : 1.0f) / (1.0f + m);
            } else
                weights[k] = exp_negative(logits[best] - logits[ids[0]]);
            total += weights[k];
        }
        if (!renormalise) {
            total = sigmoid;
            for (int64_t e = 0; e < E && !sigmoid; e++)
                total += exp_negative(logits[e] - logits[ids[0]]);
        }
        for (int64_t k = 0; k < K; k++)
            weights[k] *= scaling / total;
    }
}

/* In place, the slots of the experts `ids` [T, K]: of expert e row t takes slots[e, (t + first) % copies[e]], or without
 * `spread` slots[e, 0]. slots [E, C], copies [E]. -1 stays. */
void expert_slots(int64_t *ids, int64_t T, int64_t K, const int32_t *slots, const int32_t *copies, int64_t C,
                  int64_t first, int64_t spread)
{
    for (int64_t t = 0; t < T; t++, ids += K)
        for (int64_t k = 0; k < K; k++)
            if (ids[k] >= 0)
                ids[k] = slots[ids[k] * C + (spread ? (t + first) % copies[ids[k]] : 0)];
}

enum { SILU, GELU, GELU_TANH, CLAMPED_SWIGLU }; /* in the order of kernels.activation.ACTIVATIONS */

/* erfc(x) for x >= 0, absolute error below 3e-7 (Abramowitz and Stegun, 7.1.26). Vectorises, unlike erfcf. */
static inline float erfc_positive(float x)
{
    float t = 1.0f / (1.0f + 0.3275911f * x);
    return exp_negative(-x * x) *
           t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
}

/* hidden[I] = activation(gate[I]) * up[I], of CLAMPED_SWIGLU * (up[I] + 1) */
static void activate(const float *gate, const float *up, int64_t I, int64_t activation, float *hidden)
{
    switch (activation) {
    case SILU:
        for (int64_t i = 0; i < I; i++) {
            float g = gate[i], m = exp_negative(g < 0 ? g : -g);
            hidden[i] = g * up[i] * (g < 0 ? m : 1.0f) / (1.0f + m);
        }
        break;
    case GELU:
        for (int64_t i = 0; i < I; i++) {
            float g = gate[i], tail = 0.5f * erfc_positive((g < 0 ? -g : g) * 0.707106781f);
            hidden[i] = g * up[i] * (g < 0 ? tail : 1.0f - tail);
        }
        break;
    case GELU_TANH: /* (1 + tanh(x)) / 2 is sigmoid(2x); the factor is 2 sqrt(2 / pi) */
        for (int64_t i = 0; i < I; i++) {
            float g = gate[i], x = 1.59576912f * g * (1.0f + 0.044715f * g * g), m = exp_negative(x < 0 ? x : -x);
            hidden[i] = g * up[i] * (x < 0 ? m : 1.0f) / (1.0f + m);
        }
        break;
    case CLAMPED_SWIGLU:
        for (int64_t i = 0; i < I; i++) {
            float g = gate[i] < 7.0f ? gate[i] : 7.0f, u = up[i] < 7.0f ? up[i] : 7.0f, x = 1.702f * g;
            float m = exp_negative(x < 0 ? x : -x);
            u = u > -7.0f ? u : -7.0f;
            hidden[i] = g * (u + 1.0f) * (x < 0 ? m : 1.0f) / (1.0f + m);
        }
    }
}

/* Each row of y [rows, N] plus bias [N], which may be NULL for zeros */
static void add_bias(float *y, const float *bias, int64_t rows, int64_t N)
{
    for (int64_t r = 0; r < rows && bias; r++)
        for (int64_t n = 0; n < N; n++)
            y[r * N + n] += bias[n];
}

/* y[R, D] = (activation(x @ gate.T) * (x @ up.T)) @ down.T. Expert e has rows ends[e-1] .. ends[e].
 * w13 [experts, 2I, D] gate first, w2 [experts, D, I]; b13 [experts, 2I] and b2 [experts, D] are added to the products,
 * NULL for zeros; scratch holds 3 I floats for each row of the largest group. */
void grouped_gated_mlp(const float *x, const int32_t *ends, int64_t experts, int64_t D, int64_t I, int64_t activation,
                       const float *w13, const float *w2, const float *b13, const float *b2, float *y, float *scratch)
{
    int64_t start = 0;
    for (int64_t e = 0; e < experts; e++) {
        int64_t rows = ends[e] - start;
        float *both = scratch, *hidden = scratch + rows * 2 * I;
        product(x + start * D, w13 + e * 2 * I * D, both, rows, 2 * I, D);
        add_bias(both, b13 ? b13 + e * 2 * I : NULL, rows, 2 * I);
        for (int64_t r = 0; r < rows; r++)
            activate(both + r * 2 * I, both + r * 2 * I + I, I, activation, hidden + r * I);
        product(hidden, w2 + e * D * I, y + start * D, rows, D, I);
        add_bias(y + start * D, b2 ? b2 + e * D : NULL, rows, D);
        start = ends[e];
    }
}

/* A matrix [N, K] in four bits, as kernels.four_bit has it, not tiled. kind 0: e2m1 with exponents, 1: whole numbers with
 * scales in float16. zeros: NULL for 8; order: NULL for columns in order. */
typedef struct {
    const uint8_t *values;
    const void *scales;
    const uint8_t *zeros;
    const int32_t *order;
} four_bit;

/* float of the bits of a finite float16 */
static inline float from_half(uint16_t half)
{
    uint32_t bits = (uint32_t)(half & 0x7FFF) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f; /* moves the exponent; subnormal values come out right, too */
    return half & 0x8000 ? -value : value;
}

/* 2^(exponent - 127) for exponents up to 254 */
static inline float power_of_two(uint32_t exponent)
{
    uint32_t bits = exponent ? exponent << 23 : 1u << 22;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* out[32] = whole numbers in the low (shift 0) or the high bits of 32 bytes, minus zero, times scale */
static inline void expand_whole(const uint8_t *bytes, int shift, float zero, float scale, float *out)
{
    for (int j = 0; j < 32; j++)
        out[j] = ((float)(bytes[j] >> shift & 15) - zero) * scale;
}

/* The same of e2m1 values. Their sizes in halves, 0 1 2 3 4 6 8 12, are the largest of three lines; no table, because
 * a compiler reads tables value by value. */
static inline void expand_e2m1(const uint8_t *bytes, int shift, float scale, float *out)
{
    for (int j = 0; j < 32; j++) {
        int code = bytes[j] >> shift & 15, size = code & 7, line = 2 * size - 4, steep = 4 * size - 16;
        size = line > size ? line : size;
        size = steep > size ? steep : size;
        out[j] = (float)(size * (1 - (code >> 2 & 2))) * (0.5f * scale);
    }
}

/* out[K] = row n of a matrix */
static void expand_row(const four_bit *w, int64_t kind, int64_t group, int64_t n, int64_t N, int64_t K, float *out)
{
    const uint8_t *bytes = w->values + n * (K / 2);
    for (int64_t k = 0; k < K; k += 32) {
        int64_t at = k / group * N + n;
        const uint8_t *half = bytes + k / 64 * 32;
        int shift = k & 32 ? 4 : 0;
        if (kind)
            expand_whole(half, shift, w->zeros ? (float)w->zeros[at] : 8.0f,
                         from_half(((const uint16_t *)w->scales)[at]), out + k);
        else
            expand_e2m1(half, shift, power_of_two(((const uint8_t *)w->scales)[at]), out + k);
    }
}

/* y[rows, N] = x[rows, K] @ w[N, K].T; scratch holds OUTPUTS K floats, and K for each row where columns have an order */
static void four_bit_product(const float *x, const four_bit *w, int64_t kind, int64_t group, float *y, int64_t rows,
                             int64_t N, int64_t K, float *scratch)
{
    memset(y, 0, rows * N * sizeof *y);
    if (w->order) {
        float *ordered = scratch + OUTPUTS * K;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < K; k++)
                ordered[r * K + k] = x[r * K + w->order[k]];
        x = ordered;
    }
    for (int64_t n = 0; n < N; n += OUTPUTS) {
        int64_t r = 0, outs = N - n < OUTPUTS ? N - n : OUTPUTS;
        for (int64_t i = 0; i < outs; i++)
            expand_row(w, kind, group, n + i, N, K, scratch + i * K);
        for (; r + 4 <= rows && outs == OUTPUTS; r += 4)
            block(x + r * K, scratch, 4, OUTPUTS, K, y + r * N + n, N);
        for (; r < rows; r++)
            for (int64_t i = 0; i < outs; i++)
                block(x + r * K, scratch + i * K, 1, 1, K, y + r * N + n + i, N);
    }
}

/* y[R, N] = x[R, K] @ w[N, K].T; scratch holds OUTPUTS + R times K floats */
void four_bit_linear(const float *x, const four_bit *w, int64_t kind, int64_t group, int64_t R, int64_t K, int64_t N,
                     float *y, float *scratch)
{
    four_bit_product(x, w, kind, group, y, R, N, K, scratch);
}

/* The matrix of expert e of several [N, K] */
static four_bit four_bit_of(const four_bit *all, int64_t e, int64_t kind, int64_t group, int64_t N, int64_t K)
{
    int64_t scales = e * (K / group) * N;
    four_bit one = {
        all->values + e * N * (K / 2),
        (const char *)all->scales + scales * (kind ? 2 : 1),
        all->zeros ? all->zeros + scales : NULL,
        all->order ? all->order + e * K : NULL,
    };
    return one;
}

/* As grouped_gated_mlp, of weights in four bits: w13 [experts, 2I, D], w2 [experts, D, I]. scratch holds 3 I floats for
 * each row of the largest group, OUTPUTS + rows of that group times the larger of D and I. */
void grouped_gated_mlp_four_bit(const float *x, const int32_t *ends, int64_t experts, int64_t D, int64_t I,
                                int64_t activation, int64_t kind, int64_t group, const four_bit *w13,
                                const four_bit *w2, const float *b13, const float *b2, float *y, float *scratch)
{
    int64_t start = 0;
    for (int64_t e = 0; e < experts; start = ends[e++]) {
        int64_t rows = ends[e] - start;
        float *both = scratch, *hidden = both + rows * 2 * I, *rest = hidden + rows * I;
        four_bit up = four_bit_of(w13, e, kind, group, 2 * I, D), down = four_bit_of(w2, e, kind, group, D, I);
        if (!rows)
            continue;
        four_bit_product(x + start * D, &up, kind, group, both, rows, 2 * I, D, rest);
        add_bias(both, b13 ? b13 + e * 2 * I : NULL, rows, 2 * I);
        for (int64_t r = 0; r < rows; r++)
            activate(both + r * 2 * I, both + r * 2 * I + I, I, activation, hidden + r * I);
        four_bit_product(hidden, &down, kind, group, y + start * D, rows, D, I, rest);
        add_bias(y + start * D, b2 ? b2 + e * D : NULL, rows, D);
    }
}

/* y[rows, N] = x[rows, K] @ w[N, K].T + b[N] of each expert's rows, which end at `ends`; scratch holds OUTPUTS K floats,
 * and K for each row of the largest group where columns have an order */
void grouped_product_four_bit(const float *x, const int32_t *ends, int64_t experts, int64_t N, int64_t K, int64_t kind,
                              int64_t group, const four_bit *w, const float *b, float *y, float *scratch)
{
    int64_t start = 0;
    for (int64_t e = 0; e < experts; start = ends[e++]) {
        int64_t rows = ends[e] - start;
        four_bit one = four_bit_of(w, e, kind, group, N, K);
        if (!rows)
            continue;
        four_bit_product(x + start * K, &one, kind, group, y + start * N, rows, N, K, scratch);
        add_bias(y + start * N, b ? b + e * N : NULL, rows, N);
    }
}

/* scores[g * len + t] = scale * query[g] . key[t] over the pages of one KV head */
static void score_pages(const float *query, const float *k, const int64_t *blocks, int64_t len, int64_t G, int64_t d,
                        int64_t block_size, int64_t row, float scale, float *scores)
{
    for (int64_t first = 0; first < len; first += block_size, blocks++) {
        const float *key = k + *blocks * block_size * row;
        int64_t end = first + block_size < len ? first + block_size : len;
        for (int64_t t = first; t < end; t++, key += row) {
            prefetch(key + TOKENS_AHEAD * row, d);
            for (int64_t g = 0; g < G; g++) {
                float sum = 0;
                for (int64_t i = 0; i < d; i++)
                    sum += query[g * d + i] * key[i];
                scores[g * len + t] = sum * scale;
            }
        }
    }
}

/* result[g] = sum over t of weights[g * len + t] * value[t] */
static void sum_pages(const float *weights, const float *v, const int64_t *blocks, int64_t len, int64_t G, int64_t d,
                      int64_t block_size, int64_t row, float *result)
{
    memset(result, 0, G * d * sizeof *result);
    for (int64_t first = 0; first < len; first += block_size, blocks++) {
        const float *value = v + *blocks * block_size * row;
        int64_t end = first + block_size < len ? first + block_size : len;
        for (int64_t t = first; t < end; t++, value += row) {
            prefetch(value + TOKENS_AHEAD * row, d);
            for (int64_t g = 0; g < G; g++)
                for (int64_t i = 0; i < d; i++)
                    result[g * d + i] += weights[g * len + t] * value[i];
        }
    }
}

/* weights[0 .. len] = softmax of itself and of *sink, a score without a value; NULL: without. Returns the log of the sum
 * of all exponentials. */
static float softmax(float *p, int64_t len, const float *sink)
{
    float top = p[0], total = 0;
    for (int64_t t = 1; t < len; t++)
        top = p[t] > top ? p[t] : top;
    if (sink) {
        top = *sink > top ? *sink : top;
        total = exp_negative(*sink - top);
    }
    for (int64_t t = 0; t < len; t++) {
        p[t] = exp_negative(p[t] - top);
        total += p[t];
    }
    for (int64_t t = 0; t < len; t++)
        p[t] /= total;
    return top + logf(total);
}

/* New keys and values, rows of `row` floats k_stride and v_stride apart, into their slots of the pages */
void store_kv(const float *k, int64_t k_stride, const float *v, int64_t v_stride, const int64_t *slots, int64_t T,
              int64_t row, float *k_pages, float *v_pages)
{
    for (int64_t t = 0; t < T; t++) {
        memcpy(k_pages + slots[t] * row, k + t * k_stride, row * sizeof *k);
        memcpy(v_pages + slots[t] * row, v + t * v_stride, row * sizeof *v);
    }
}

/* Attention of one new token of each sequence over its pages; strides in floats.
 * q, out [B, H, d] (q rows may be strided); k, v [blocks, block_size, h, d]; table [B, table_stride];
 * lens [B] tokens with the new one, of which the last `window` are attended to, 0: all; sinks [H] scores without values,
 * NULL: none; shared [B] leading tokens that are left out where no window leaves out more, NULL: none; lse [B, H] the
 * log of the sums of exponentials, NULL: not wanted; scratch holds G * (longest len) floats. */
void paged_decode(const float *q, int64_t q_stride, const float *k, const float *v, const int64_t *table,
                  int64_t table_stride, const int32_t *lens, int64_t B, int64_t h, int64_t G, int64_t d,
                  int64_t block_size, int64_t window, float scale, const float *sinks, const int32_t *shared,
                  float *out, float *lse, float *scratch)
{
    for (int64_t b = 0; b < B; b++) {
        int64_t first = window && lens[b] > window ? lens[b] - window : shared ? shared[b] : 0;
        int64_t hidden = first % block_size;
        int64_t len = lens[b] - first + hidden;
        const int64_t *blocks = table + b * table_stride + first / block_size;
        for (int64_t j = 0; j < h; j++) {
            score_pages(q + b * q_stride + j * G * d, k + j * d, blocks, len, G, d, block_size, h * d, scale, scratch);
            for (int64_t g = 0; g < G; g++) {
                float *p = scratch + g * len;
                memset(p, 0, hidden * sizeof *p);
                float sum = softmax(p + hidden, len - hidden, sinks ? sinks + j * G + g : NULL);
                if (lse)
                    lse[(b * h + j) * G + g] = sum;
            }
            sum_pages(scratch, v + j * d, blocks, len, G, d, block_size, h * d, out + (b * h + j) * G * d);
        }
    }
}

/* Pairs of (row, expert) whose expert is in first .. first + experts, grouped by expert in their old order.
 * ids [pairs]; pair and row have room for all; ends [experts] are where each expert's pairs end. Returns their number. */
int64_t route_pairs(const int64_t *ids, int64_t pairs, int64_t first, int64_t experts, int64_t top_k, int64_t *pair,
                    int64_t *row, int32_t *ends)
{
    int32_t start = 0;
    memset(ends, 0, experts * sizeof *ends);
    for (int64_t p = 0; p < pairs; p++)
        if (ids[p] >= first && ids[p] < first + experts)
            ends[ids[p] - first]++;
    for (int64_t e = 0; e < experts; e++) {
        int32_t count = ends[e];
        ends[e] = start; /* for now where the expert's next pair goes: in the end, where they end */
        start += count;
    }
    for (int64_t p = 0; p < pairs; p++)
        if (ids[p] >= first && ids[p] < first + experts) {
            int32_t place = ends[ids[p] - first]++;
            pair[place] = p;
            row[place] = p / top_k;
        }
    return start;
}

/* out[N, D] = sum of weight[r] * y[r] over the r whose row[r] is that row; weight may be NULL for ones */
void sum_rows(const float *y, const int64_t *row, const float *weight, int64_t R, int64_t D, int64_t N, float *out)
{
    memset(out, 0, N * D * sizeof *out);
    for (int64_t r = 0; r < R; r++) {
        float *sum = out + row[r] * D, w = weight ? weight[r] : 1.0f;
        for (int64_t i = 0; i < D; i++)
            sum[i] += w * y[r * D + i];
    }
}

/* Rows of an exchange, row_bytes apart: x_bytes of x, its K expert ids, its K weights */
void pack_rows(const char *x, const int64_t *ids, const float *weights, int64_t T, int64_t K, int64_t x_bytes,
               int64_t row_bytes, char *rows)
{
    for (int64_t t = 0; t < T; t++, rows += row_bytes) {
        int32_t *id = (int32_t *)(rows + x_bytes);
        memcpy(rows, x + t * x_bytes, x_bytes);
        for (int64_t k = 0; k < K; k++)
            id[k] = ids[t * K + k];
        memcpy(id + K, weights + t * K, K * sizeof *weights);
    }
}

/* Of the rows that all ranks packed, counts[r] of them at rows + r * slot_bytes, the pairs whose expert is in
 * first .. first + experts, grouped by expert in the order of ranks and rows. row [R] counts a pair's row over all ranks,
 * place [R] is where it lies, in bytes; all three have room for every pair. ends [experts] as in route_pairs. Returns R. */
int64_t route_rows(const char *rows, int64_t slot_bytes, const int64_t *counts, int64_t ranks, int64_t K,
                   int64_t x_bytes, int64_t row_bytes, int64_t first, int64_t experts, int64_t *row, int64_t *place,
                   float *weight, int32_t *ends)
{
    int32_t start = 0;
    memset(ends, 0, experts * sizeof *ends);
    for (int pass = 0; pass < 2; pass++) {
        int64_t n = 0;
        for (int64_t r = 0; r < ranks; r++)
            for (int64_t t = 0; t < counts[r]; t++, n++) {
                int64_t at = r * slot_bytes + t * row_bytes;
                const int32_t *id = (const int32_t *)(rows + at + x_bytes);
                for (int64_t k = 0; k < K; k++) {
                    int32_t *end = ends + (id[k] - first);
                    if (id[k] < first || id[k] >= first + experts)
                        continue;
                    if (pass) {
                        row[*end] = n;
                        place[*end] = at;
                        memcpy(weight + *end, id + K + k, sizeof *weight);
                    }
                    ++*end;
                }
            }
        for (int64_t e = 0; e < experts && !pass; e++) {
            int32_t count = ends[e];
            ends[e] = start; /* as in route_pairs */
            start += count;
        }
    }
    return start;
}

/* out[r] = the x_bytes at rows + place[r] */
void take_rows(const char *rows, const int64_t *place, int64_t R, int64_t x_bytes, char *out)
{
    for (int64_t r = 0; r < R; r++)
        memcpy(out + r * x_bytes, rows + place[r], x_bytes);
}

/* out[count] = sum over the ranks of count floats, stride apart */
void sum_slots(const float *sums, int64_t stride, int64_t ranks, int64_t count, float *out)
{
    memcpy(out, sums, count * sizeof *out);
    for (int64_t r = 1; r < ranks; r++)
        for (int64_t i = 0; i < count; i++)
            out[i] += sums[r * stride + i];
}

#define STATE_COLUMNS 32 /* of a head's state: 128 rows of them stay in the first cache between both passes */

/* Sum of a causal convolution of C channels, then SiLU; the tail [width-1, C] moves on by the token x [C].
 * weight [C, width], the token itself has the last one. */
static inline __attribute__((always_inline)) void convolve(const float *x, const float *weight, int64_t C,
                                                           const int64_t width, float *tail, float *out)
{
    for (int64_t c = 0; c < C; c++) {
        float sum = x[c] * weight[c * width + width - 1], m;
        for (int64_t t = 0; t < width - 1; t++)
            sum += tail[t * C + c] * weight[c * width + t];
        m = exp_negative(sum < 0 ? sum : -sum);
        out[c] = sum * (sum < 0 ? m : 1.0f) / (1.0f + m);
    }
    if (width > 1) {
        memmove(tail, tail + C, (width - 2) * C * sizeof *tail);
        memcpy(tail + (width - 2) * C, x, C * sizeof *tail);
    }
}

/* x[d] *= factor / sqrt(sum of squares + eps) */
static void scale_to_length(float *x, int64_t d, float factor, float eps)
{
    float sum = eps;
    for (int64_t i = 0; i < d; i++)
        sum += x[i] * x[i];
    sum = factor / sqrtf(sum);
    for (int64_t i = 0; i < d; i++)
        x[i] *= sum;
}

/* One token's update of some columns of a state, rows of `stride` floats: S <- decay S + k (beta (v - decay S^T k))^T,
 * out = S^T q of the new S, which follows from the old one by `product`, k . q. */
static inline __attribute__((always_inline)) void advance_columns(float *state, int64_t stride, const int64_t columns,
                                                                  int64_t d, const float *q, const float *k,
                                                                  float product, float decay, float beta,
                                                                  const float *v, float *out)
{
    float by_k[STATE_COLUMNS] = {0}, by_q[STATE_COLUMNS] = {0};
    for (int64_t i = 0; i < d; i++)
        for (int64_t j = 0; j < columns; j++) {
            by_k[j] += state[i * stride + j] * k[i];
            by_q[j] += state[i * stride + j] * q[i];
        }
    for (int64_t j = 0; j < columns; j++) {
        by_k[j] = beta * (v[j] - decay * by_k[j]);
        out[j] = decay * by_q[j] + product * by_k[j];
    }
    for (int64_t i = 0; i < d; i++)
        for (int64_t j = 0; j < columns; j++)
            state[i * stride + j] = decay * state[i * stride + j] + k[i] * by_k[j];
}

/* Values of bfloat16 as float, and back, rounded to nearest, ties to even. NaN stays NaN. */
static void widen(const uint16_t *x, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

static uint16_t narrowed(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded);
}

static void narrow(const float *x, int64_t n, uint16_t *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = narrowed(x[i]);
}

/* x as a later step would read it from a state of bfloat16 */
static void round_bfloat16(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)narrowed(x[i]) << 16;
        memcpy(x + i, &bits, sizeof bits);
    }
}

/* A gated delta net: its sizes and weights. K key heads, each of G value heads; k, v their dims; D drafts of a slot.
 * A row has C = 2 K k + K G v channels, q, k, v, and the gates' projections a, b of the value heads. */
typedef struct {
    int64_t K, G, k, v, width, D;
    float eps;
    const float *conv_weight, *neg_exp_a, *dt_bias;
} DeltaNet;

static int64_t delta_channels(const DeltaNet *net)
{
    return 2 * net->K * net->k + net->K * net->G * net->v;
}

/* Read a row: x [C] gets q, k and v, the tail moves on by the row; gates [V, 2] get the decay and beta of each head. */
static void read_delta_row(const DeltaNet *net, const float *mixed, const float *a, const float *b, float *tail,
                           float *x, float *gates)
{
    int64_t K = net->K, k = net->k, C = delta_channels(net);
    if (net->width == 4)
        convolve(mixed, net->conv_weight, C, 4, tail, x);
    else
        convolve(mixed, net->conv_weight, C, net->width, tail, x);
    for (int64_t h = 0; h < K; h++) {
        scale_to_length(x + h * k, k, 1.0f / sqrtf((float)k), net->eps);
        scale_to_length(x + (K + h) * k, k, 1.0f, net->eps);
    }
    for (int64_t h = 0; h < K * net->G; h++) {
        float dt = a[h] + net->dt_bias[h];
        gates[2 * h] = expf(net->neg_exp_a[h] * (dt > 20.0f ? dt : log1pf(expf(dt))));
        gates[2 * h + 1] = 1.0f / (1.0f + expf(-b[h]));
    }
}

/* Advance the state [k, v] of value head h by a row that was read; out [v] */
static void advance_head(const DeltaNet *net, int64_t h, const float *x, const float *gates, float *state, float *out)
{
    int64_t k = net->k, v = net->v;
    const float *query = x + h / net->G * k, *key = query + net->K * k, *value = x + 2 * net->K * k + h * v;
    float product = 0, decay = gates[2 * h], beta = gates[2 * h + 1];
    for (int64_t i = 0; i < k; i++)
        product += query[i] * key[i];
    for (int64_t first = 0; first < v; first += STATE_COLUMNS) {
        float *part = state + first, *result = out + first;
        if (v - first >= STATE_COLUMNS)
            advance_columns(part, v, STATE_COLUMNS, k, query, key, product, decay, beta, value + first, result);
        else
            advance_columns(part, v, v - first, k, query, key, product, decay, beta, value + first, result);
    }
}

/* Each of B sequences: its accepted drafts, then its rows starts[s] to starts[s + 1], of which the first one counts.
 * A slot gets the state behind that row, and the inputs of all rows behind it, which are drafts. `before` rows of the
 * first sequence were computed in this step already, its first row among them.
 * slots: a slot with a state, or minus a slot without one, which is cleared first; 0 is the null slot, cleared too.
 * conv [slots, width-1, C], states [slots, V, k, v], of bfloat16 where bf16 is true, drafts [slots, D, C + 2 V],
 * accepted [slots], out [rows, V, v]. scratch holds (2 D + 1) (C + 2 V) + (width - 1) C + k v + v floats. */
void delta_decode(const float *mixed, int64_t mixed_stride, const float *a, int64_t a_stride, const float *b,
                  int64_t b_stride, const float *conv_weight, const float *neg_exp_a, const float *dt_bias,
                  const int64_t *slots, const int64_t *starts, int64_t before, int64_t B, int64_t K, int64_t G,
                  int64_t k, int64_t v, int64_t width, int64_t D, float eps, float *conv, void *states, int64_t bf16,
                  float *drafts, const int64_t *accepted, float *out, float *scratch)
{
    DeltaNet net = {K, G, k, v, width, D, eps, conv_weight, neg_exp_a, dt_bias};
    int64_t V = K * G, C = delta_channels(&net), row_size = C + 2 * V, bytes = bf16 ? 2 : 4;
    float *later_tail = scratch + (2 * D + 1) * row_size, *head = later_tail + (width - 1) * C, *unused = head + k * v;
    for (int64_t s = 0; s < B; s++) {
        int64_t slot = slots[s] < 0 ? -slots[s] : slots[s], begun = s ? 0 : before, kept = 0;
        float *tail = conv + slot * (width - 1) * C, *inputs = drafts + slot * D * row_size, *x = scratch;
        char *state = (char *)states + slot * V * k * v * bytes;
        if (slots[s] <= 0) {
            memset(tail, 0, (width - 1) * C * sizeof *tail);
            memset(state, 0, V * k * v * bytes);
        } else if (D)
            kept = begun ? begun - 1 : accepted[slot];
        if (begun) /* the tail of the slot is that behind the first row */
            tail = memcpy(later_tail, tail, (width - 1) * C * sizeof *tail);
        for (int64_t r = 0; r < kept; r++, x += row_size)
            read_delta_row(&net, inputs + r * row_size, inputs + r * row_size + C, inputs + r * row_size + C + V, tail,
                           x, x + C);
        for (int64_t r = starts[s]; r < starts[s + 1]; r++, x += row_size) {
            int64_t place = begun + r - starts[s];
            const float *row = mixed + r * mixed_stride, *row_a = a + r * a_stride, *row_b = b + r * b_stride;
            read_delta_row(&net, row, row_a, row_b, tail, x, x + C);
            if (place == 0) {
                if (starts[s + 1] - r > 1)
                    tail = memcpy(later_tail, tail, (width - 1) * C * sizeof *tail);
                continue;
            }
            float *input = inputs + (place - 1) * row_size;
            memcpy(input, row, C * sizeof *row);
            memcpy(input + C, row_a, V * sizeof *row);
            memcpy(input + C + V, row_b, V * sizeof *row);
        }
        for (int64_t h = 0; h < V; h++) {
            char *stored = state + h * k * v * bytes;
            float *now = bf16 || begun ? head : (float *)stored;
            if (bf16)
                widen((uint16_t *)stored, k * v, head);
            else if (begun)
                memcpy(head, stored, k * v * sizeof *head);
            for (int64_t r = -kept; r < starts[s + 1] - starts[s]; r++) {
                const float *read = scratch + (kept + r) * row_size;
                float *result = r < 0 ? unused : out + ((starts[s] + r) * V + h) * v;
                if (begun + r == 1 && now != head)
                    now = memcpy(head, stored, k * v * sizeof *head);
                advance_head(&net, h, read, read + C, now, result);
                if (bf16 && begun + r == 0)
                    narrow(now, k * v, (uint16_t *)stored);
                if (bf16 && starts[s] + r + 1 < starts[s + 1])
                    round_bfloat16(now, k * v);
            }
        }
    }
}
