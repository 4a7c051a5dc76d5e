// Loss of a feed-forward network and its gradient in the weights, for many weights at once.
//
// One chain after the other, tile of rows after tile of rows, so that a tile's activations stay in the cache from the
// forward to the backward pass and nothing is allocated. Features lead: an activation is (features, rows of the tile).
// Every chain is computed by the same operations in the same order whatever the others are, and however many threads.
// Read by ctypes from native.py, which lays out `shape` and the buffers; no header but the standard library's.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace {

typedef int64_t Int;
const double NOISE_FLOOR = 1e-6;  // as likelihoods.py has it

template <class T> struct Vector {
    typedef T V __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
    static constexpr Int lanes = VECTOR_BYTES / sizeof(T);
};

// matrix products of a few rows ----------------------------------------------------------------------------------------

// How a product starts and ends: added to what is there or to a bias for each row; multiplied by factors laid out as C.
template <class T> struct Form {
    bool add;
    const T *bias, *factor;
    Form at(Int row, Int column, Int ldc) const {
        return {add, bias ? bias + row : bias, factor ? factor + row * ldc + column : factor};
    }
};

// C (MR rows, NR vectors) = A B; element (i, p) of A is A[i * ars + p * acs], rows of B and C are contiguous.
template <class T, int MR, int NR>
inline void nn_block(Int k, const T* A, Int ars, Int acs, const T* B, Int ldb, T* C, Int ldc, Form<T> form) {
    typedef typename Vector<T>::V V;
    constexpr Int lanes = Vector<T>::lanes;
    V acc[MR][NR];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) {
            if (form.add) acc[i][j] = *(const V*)(C + i * ldc + j * lanes);
            else acc[i][j] = V{} + (form.bias ? form.bias[i] : T(0));
        }
    for (Int p = 0; p < k; p++) {
        V b[NR];
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) b[j] = *(const V*)(B + p * ldb + j * lanes);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const V a = V{} + A[i * ars + p * acs];
#pragma GCC unroll 4
            for (int j = 0; j < NR; j++) acc[i][j] += a * b[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) {
            if (form.factor) acc[i][j] *= *(const V*)(form.factor + i * ldc + j * lanes);
            *(V*)(C + i * ldc + j * lanes) = acc[i][j];
        }
}

template <class T, int MR, int NR>
void nn_rest(Int rows, Int k, const T* A, Int ars, Int acs, const T* B, Int ldb, T* C, Int ldc, Form<T> form) {
    if (rows == MR) nn_block<T, MR, NR>(k, A, ars, acs, B, ldb, C, ldc, form);
    else if constexpr (MR > 1) nn_rest<T, MR - 1, NR>(rows, k, A, ars, acs, B, ldb, C, ldc, form);
}

template <class T, int MR, int NR>
void nn_panel(Int m, Int k, const T* A, Int ars, Int acs, const T* B, Int ldb, T* C, Int ldc, Form<T> form) {
    for (Int i = 0; i < m; i += MR)
        nn_rest<T, MR, NR>(m - i < MR ? m - i : MR, k, A + i * ars, ars, acs, B, ldb, C + i * ldc, ldc,
                           form.at(i, 0, ldc));
}

// n is a multiple of the lanes.
template <class T>
void nn(Int m, Int n, Int k, const T* A, Int ars, Int acs, const T* B, Int ldb, T* C, Int ldc, Form<T> form) {
    constexpr Int lanes = Vector<T>::lanes;
    Int j = 0;
    for (; j + 2 * lanes <= n; j += 2 * lanes)
        nn_panel<T, 6, 2>(m, k, A, ars, acs, B + j, ldb, C + j, ldc, form.at(0, j, ldc));
    if (j < n) nn_panel<T, 12, 1>(m, k, A, ars, acs, B + j, ldb, C + j, ldc, form.at(0, j, ldc));
}

// C (MR, NR) += A B', sums over k, a multiple of the lanes.
template <class T, int MR, int NR>
inline void nt_block(Int k, const T* A, Int lda, const T* B, Int ldb, T* C, Int ldc) {
    typedef typename Vector<T>::V V;
    constexpr Int lanes = Vector<T>::lanes;
    V acc[MR][NR];
#pragma GCC unroll 4
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) acc[i][j] = V{};
    for (Int p = 0; p < k; p += lanes) {
        V b[NR];
#pragma GCC unroll 4
        for (int j = 0; j < NR; j++) b[j] = *(const V*)(B + j * ldb + p);
#pragma GCC unroll 4
        for (int i = 0; i < MR; i++) {
            const V a = *(const V*)(A + i * lda + p);
#pragma GCC unroll 4
            for (int j = 0; j < NR; j++) acc[i][j] += a * b[j];
        }
    }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < NR; j++) {
            T sum = 0;
            for (Int lane = 0; lane < lanes; lane++) sum += acc[i][j][lane];
            C[i * ldc + j] += sum;
        }
}

template <class T, int MR> void nt_rows(Int n, Int k, const T* A, Int lda, const T* B, Int ldb, T* C, Int ldc) {
    Int j = 0;
    for (; j + 3 <= n; j += 3) nt_block<T, MR, 3>(k, A, lda, B + j * ldb, ldb, C + j, ldc);
    for (; j < n; j++) nt_block<T, MR, 1>(k, A, lda, B + j * ldb, ldb, C + j, ldc);
}

template <class T> void nt(Int m, Int n, Int k, const T* A, Int lda, const T* B, Int ldb, T* C, Int ldc) {
    Int i = 0;
    for (; i + 4 <= m; i += 4) nt_rows<T, 4>(n, k, A + i * lda, lda, B, ldb, C + i * ldc, ldc);
    for (; i < m; i++) nt_rows<T, 1>(n, k, A + i * lda, lda, B, ldb, C + i * ldc, ldc);
}

// functions, written so that compilers turn loops over them into vector instructions; NaN goes through ------------------

inline float exponential(float x) {  // Cephes expf: about 1e-7 relative
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;  // so that the reciprocal isn't denormal, either
    const float n = std::floor(x * 1.44269504088896341f + 0.5f);
    x = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return (p * x * x + x + 1.0f) * power;
}

inline double exponential(double x) {  // Cephes exp: 2e-16 relative
    x = x < -708.0 ? -708.0 : x;
    x = x > 708.0 ? 708.0 : x;
    const double n = std::floor(x * 1.4426950408889634074 + 0.5);
    x = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
    const double s = x * x;
    const double p = x * ((1.26177193074810590878e-4 * s + 3.02994407707441961300e-2) * s + 9.99999999999999999910e-1);
    const double q =
        ((3.00198505138664455042e-6 * s + 2.52448340349684104192e-3) * s + 2.27265548208155028766e-1) * s + 2.0;
    // Adding 1.5 * 2^52 leaves an integer in the lowest bits; of a NaN, which the factor before keeps, any will do.
    const double shifted = n + (6755399441055744.0 + 1023.0);
    int64_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (int64_t)((uint64_t)bits << 52);
    double power;
    std::memcpy(&power, &bits, sizeof(power));
    return (1.0 + 2.0 * (p / (q - p))) * power;
}

inline float hyperbolic(float x) {  // the rational function that Eigen and XLA use: 4e-7 relative
    x = x < -7.90531110763549805f ? -7.90531110763549805f : x;
    x = x > 7.90531110763549805f ? 7.90531110763549805f : x;
    const float s = x * x;
    float p = -2.76076847742355e-16f;
    p = p * s + 2.00018790482477e-13f;
    p = p * s + -8.60467152213735e-11f;
    p = p * s + 5.12229709037114e-08f;
    p = p * s + 1.48572235717979e-05f;
    p = p * s + 6.37261928875436e-04f;
    p = p * s + 4.89352455891786e-03f;
    float q = 1.19825839466702e-06f;
    q = q * s + 1.18534705686654e-04f;
    q = q * s + 2.26843463243900e-03f;
    q = q * s + 4.89352518554385e-03f;
    return x * p / q;
}

inline double hyperbolic(double x) {  // Cephes tanh: 3e-16 relative
    const double a = x < 0 ? -x : x, s = x * x;
    const double p = (-9.64399179425052238628e-1 * s + -9.92877231001918586564e1) * s + -1.61468768441708447952e3;
    const double q = ((s + 1.12811678491632931402e2) * s + 2.23548839060100448583e3) * s + 4.84406305325125486048e3;
    const double small = x + x * s * (p / q);
    const double large = 1.0 - 2.0 / (exponential(2.0 * a) + 1.0);
    return a < 0.625 ? small : (x < 0 ? -large : large);
}

template <class T> inline T logistic(T x) { return T(1) / (T(1) + exponential(-x)); }

enum Activation { IDENTITY, RELU, LEAKY_RELU, TANH, SIGMOID, SILU, ELU };

// h = f(h), d = f'(h)
template <class T> void activate(Int kind, T parameter, Int count, T* __restrict__ h, T* __restrict__ d) {
    switch (kind) {
    case RELU:
        for (Int i = 0; i < count; i++) { const T x = h[i]; d[i] = x > 0 ? T(1) : T(0); h[i] = x < 0 ? T(0) : x; }
        break;
    case LEAKY_RELU:
        for (Int i = 0; i < count; i++) { const T x = h[i]; d[i] = x > 0 ? T(1) : parameter; h[i] = x * d[i]; }
        break;
    case TANH:
        for (Int i = 0; i < count; i++) { const T t = hyperbolic(h[i]); h[i] = t; d[i] = T(1) - t * t; }
        break;
    case SIGMOID:
        for (Int i = 0; i < count; i++) { const T s = logistic(h[i]); h[i] = s; d[i] = s * (T(1) - s); }
        break;
    case SILU:
        for (Int i = 0; i < count; i++) d[i] = logistic(h[i]);  // a loop of its own: together they take twice as long
        for (Int i = 0; i < count; i++) {
            const T x = h[i], s = d[i];
            h[i] = x * s;
            d[i] = s * (T(1) + x * (T(1) - s));
        }
        break;
    case ELU:
        for (Int i = 0; i < count; i++) {
            const T x = h[i], e = parameter * exponential(x < 0 ? x : T(0));
            h[i] = x > 0 ? x : e - parameter;
            d[i] = x > 0 ? T(1) : e;
        }
        break;
    }
}

// the network ----------------------------------------------------------------------------------------------------------

enum Loss { SQUARES, CROSS_ENTROPY, NOISE };  // as feedforward.py numbers them

struct Network {
    Int layers, rows, tile, lead, width, batch, loss;  // width: inputs, padded to lanes; batch: 0 for all rows
    const Int *sizes, *weight, *bias, *activation;            // of each layer: outputs; offsets in z (bias -1: none)
    Int dim, scratch;
    explicit Network(const Int* s) {
        layers = s[0]; rows = s[1]; tile = s[2]; lead = s[3]; width = s[4]; batch = s[5]; loss = s[6];
        dim = s[7]; scratch = s[8];
        sizes = s + 9;
        weight = sizes + layers + 1;
        bias = weight + layers;
        activation = bias + layers;
    }
    Int inputs() const { return sizes[0]; }
    Int outputs() const { return sizes[layers]; }
    Int targets() const { return loss == NOISE ? outputs() / 2 : outputs(); }
};

// Data of the whole set: tiles (inputs, lead) one after the other, and rows (width) of which a batch is gathered.
template <class T> struct Data {
    const T *tiles, *x, *y;  // y: (rows, targets) real targets
    const Int* labels;
    const T* parameters;  // of the activations
};

// Mean-squared or cross-entropy loss of a tile; what it leaves in `out` is the gradient there. Rows beyond count: 0.
template <class T> double gaussian(const Network& net, Int count, const T* y, T* out) {
    double total = 0;
    const Int K = net.outputs();
    for (Int k = 0; k < K; k++) {
        T* r = out + k * net.lead;
        T sum = 0;
        for (Int n = 0; n < count; n++) { r[n] -= y[n * K + k]; sum += r[n] * r[n]; }
        for (Int n = count; n < net.tile; n++) r[n] = 0;
        total += 0.5 * sum;
    }
    return total;
}

// Half the squared error in units of a noise that the second half of the outputs gives, and the noise's logarithm.
template <class T> double noise(const Network& net, Int count, const T* y, T* out) {
    double total = 0;
    const Int K = net.targets();
    for (Int k = 0; k < K; k++) {
        T *mean = out + k * net.lead, *raw = out + (K + k) * net.lead;
        for (Int n = 0; n < count; n++) {
            const T r = raw[n], e = exponential(r > 0 ? -r : r), slope = (r > 0 ? T(1) : e) / (T(1) + e);
            const T scale = (r > 0 ? r : T(0)) + std::log1p(e) + T(NOISE_FLOOR), error = (mean[n] - y[n * K + k]) / scale;
            total += 0.5 * error * error + std::log(scale);
            mean[n] = error / scale;
            raw[n] = (T(1) - error * error) / scale * slope;
        }
        for (Int n = count; n < net.tile; n++) mean[n] = raw[n] = 0;
    }
    return total;
}

template <class T> double cross_entropy(const Network& net, Int count, const Int* labels, T* out, T* top, T* sum) {
    const Int K = net.outputs(), lead = net.lead, tile = net.tile;
    double total = 0;
    for (Int n = 0; n < tile; n++) { top[n] = out[n]; sum[n] = 0; }
    for (Int k = 1; k < K; k++)
        for (Int n = 0; n < tile; n++) top[n] = out[k * lead + n] > top[n] ? out[k * lead + n] : top[n];
    for (Int n = 0; n < count; n++) total += top[n] - out[labels[n] * lead + n];
    for (Int k = 0; k < K; k++) {
        T* o = out + k * lead;
        for (Int n = 0; n < tile; n++) { o[n] = exponential(o[n] - top[n]); sum[n] += o[n]; }
    }
    for (Int n = 0; n < count; n++) total += std::log(sum[n]);
    for (Int n = 0; n < tile; n++) sum[n] = n < count ? T(1) / sum[n] : T(0);
    for (Int k = 0; k < K; k++) {
        T* o = out + k * lead;
        for (Int n = 0; n < tile; n++) o[n] *= sum[n];
    }
    for (Int n = 0; n < count; n++) out[labels[n] * lead + n] -= T(1);
    return total;
}

template <class T>
void chain(const Network& net, const Data<T>& data, const T* w, const Int* batch, T scale, T* loss, T* gradient, T* scratch) {
    const Int L = net.layers, lead = net.lead, tile = net.tile, width = net.width;
    T* first = scratch;  // gradient of the first layer's weights (sizes[1], width)
    T* xt = first + net.sizes[1] * width;
    T* xr = xt + net.inputs() * lead;
    T* top = xr + tile * width;
    T* sum = top + tile;
    T* targets = sum + tile;
    Int* labels = (Int*)(targets + tile * net.outputs());
    T* h = (T*)(labels + tile);  // for each layer its outputs and their derivatives, (sizes[l + 1], lead) each
    std::memset(first, 0, sizeof(T) * net.sizes[1] * width);
    std::memset(gradient, 0, sizeof(T) * net.dim);
    const Int count = batch ? net.batch : net.rows;
    double total = 0;
    for (Int start = 0; start < count; start += tile) {
        const Int rows = count - start < tile ? count - start : tile;
        const T *x_tile, *x_rows, *y;
        const Int* classes = nullptr;
        if (batch) {
            for (Int n = 0; n < tile; n++) {
                const Int row = batch[start + (n < rows ? n : 0)];
                std::memcpy(xr + n * width, data.x + row * width, sizeof(T) * width);
                if (net.loss == CROSS_ENTROPY) labels[n] = data.labels[row];
                else std::memcpy(targets + n * net.targets(), data.y + row * net.targets(), sizeof(T) * net.targets());
            }
            for (Int i = 0; i < net.inputs(); i++)
                for (Int n = 0; n < tile; n++) xt[i * lead + n] = xr[n * width + i];
            x_tile = xt; x_rows = xr; y = targets; classes = labels;
        } else {
            x_tile = data.tiles + start / tile * net.inputs() * lead;
            x_rows = data.x + start * width;
            y = data.y ? data.y + start * net.targets() : nullptr;
            classes = data.labels ? data.labels + start : nullptr;
        }
        const T* below = x_tile;
        T* at = h;
        for (Int l = 0; l < L; l++) {
            const Int in = net.sizes[l], out = net.sizes[l + 1];
            nn<T>(out, tile, in, w + net.weight[l], in, 1, below, lead, at, lead,
                  {false, net.bias[l] < 0 ? nullptr : w + net.bias[l], nullptr});
            if (net.activation[l] != IDENTITY)
                for (Int i = 0; i < out; i++)
                    activate<T>(net.activation[l], data.parameters[l], tile, at + i * lead, at + (out + i) * lead);
            below = at;
            at += 2 * out * lead;
        }
        T* delta = (T*)below;
        if (net.loss == CROSS_ENTROPY) total += cross_entropy<T>(net, rows, classes, delta, top, sum);
        else if (net.loss == NOISE) total += noise<T>(net, rows, y, delta);
        else total += gaussian<T>(net, rows, y, delta);
        if (net.activation[L - 1] != IDENTITY) {
            const T* slope = delta + net.outputs() * lead;
            for (Int i = 0; i < net.outputs(); i++)
                for (Int n = 0; n < tile; n++) delta[i * lead + n] *= slope[i * lead + n];
        }
        for (Int l = L - 1; l >= 0; l--) {
            const Int in = net.sizes[l], out = net.sizes[l + 1];
            if (net.bias[l] >= 0)
                for (Int i = 0; i < out; i++) {
                    T s = 0;
                    for (Int n = 0; n < tile; n++) s += delta[i * lead + n];
                    gradient[net.bias[l] + i] += s;
                }
            if (l == 0) {
                nn<T>(out, width, tile, delta, lead, 1, x_rows, width, first, width, {true, nullptr, nullptr});
                break;
            }
            T* under = delta - 2 * in * lead;  // the layer below: its outputs, then their derivatives
            nt<T>(out, in, tile, delta, lead, under, lead, gradient + net.weight[l], in);
            nn<T>(in, tile, out, w + net.weight[l], 1, in, delta, lead, under, lead,
                  {false, nullptr, net.activation[l - 1] == IDENTITY ? nullptr : under + in * lead});
            delta = under;
        }
    }
    T* g = gradient + net.weight[0];
    for (Int i = 0; i < net.sizes[1]; i++)
        for (Int j = 0; j < net.inputs(); j++) g[i * net.inputs() + j] = first[i * width + j];
    for (Int i = 0; i < net.dim; i++) gradient[i] *= scale;
    *loss = (T)total;
}

template <class T>
void run(const Int* shape, const Data<T>& data, Int chains, const T* w, Int stride, const Int* batch, const T* scale,
         T* loss, T* gradient, T* scratch, Int threads) {
    const Network net(shape);
    auto part = [&](Int t) {
        for (Int c = chains * t / threads; c < chains * (t + 1) / threads; c++)
            chain<T>(net, data, w + c * stride, batch ? batch + c * net.batch : nullptr, scale[c], loss + c,
                     gradient + c * net.dim, scratch + t * net.scratch);
    };
    std::vector<std::thread> others;
    for (Int t = 1; t < threads; t++) others.emplace_back(part, t);
    part(0);
    for (auto& other : others) other.join();
}

}  // namespace

#define ENTRY(NAME, T)                                                                                                 \
    extern "C" void NAME(const Int* shape, const T* tiles, const T* x, const T* y, const Int* labels,                  \
                         const T* parameters, Int chains, const T* w, Int stride, const Int* batch, const T* scale,    \
                         T* loss, T* gradient, T* scratch, Int threads) {                                              \
        run<T>(shape, {tiles, x, y, labels, parameters}, chains, w, stride, batch, scale, loss, gradient, scratch,     \
               threads);                                                                                               \
    }

ENTRY(loss_and_gradient_float, float)
ENTRY(loss_and_gradient_double, double)

extern "C" Int vector_bytes() { return VECTOR_BYTES; }
