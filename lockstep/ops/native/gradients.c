/* Parts of gradients that are one expression per element. Their sums over rows and tokens are torch's.
 *
 * They have the bits of the plain expressions in torch, which run without this library: every product, sum and
 * difference is rounded as there.
 */
#include "activation.h"

/* Gradient of both halves of gate_up: [rows, 2 * dim] */
void silu_mul_backward(RowJob *j) {
    int64_t dim = j->size[0], activation = j->size[1];
    EACH_ROW(j) {
        const float *grad = (const float *)j->at[1] + row * dim, *gate_up = (const float *)j->at[2] + row * 2 * dim;
        float *out = (float *)j->at[0] + row * 2 * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            V gate = load_first(gate_up + i, dim - i, 0), up = load_first(gate_up + dim + i, dim - i, 0);
            Gated of = gated(activation, gate, up);
            V g = load_first(grad + i, dim - i, 0), sigmoid = 1.0f / (exp_(-of.x) + 1.0f), active = of.gate * sigmoid;
            V of_gate = g * of.up * (sigmoid + active * (1.0f - sigmoid) * of.slope);
            store_first(out + i, of_gate * gate_inside(activation, gate), dim - i);
            store_first(out + dim + i, g * active * up_inside(activation, up), dim - i);
        }
    }
}

/* For RMSNorm of x, [rows, heads, dim] with a row stride, with weights per head: the terms of the mean in the gradient,
 * grad * weight * normed, and the weight's gradient per row, grad * normed; normed is x * rstd, rstd [rows, heads]. */
void norm_products(RowJob *j) {
    int64_t stride = j->size[0], heads = j->size[1], dim = j->size[2];
    EACH_ROW(j)
        for (int64_t h = 0; h < heads; h++) {
            int64_t at = (row * heads + h) * dim;
            float *restrict product = (float *)j->at[0] + at, *restrict grad_weight = (float *)j->at[1] + at;
            const float *restrict x = (const float *)j->at[2] + row * stride + h * dim;
            const float *restrict weight = (const float *)j->at[3] + h * dim, *restrict grad = (const float *)j->at[4] + at;
            float rstd = ((const float *)j->at[5])[row * heads + h];
            for (int64_t i = 0; i < dim; i++) {
                float normed = x[i] * rstd;
                product[i] = grad[i] * weight[i] * normed;
                grad_weight[i] = grad[i] * normed;
            }
        }
}

/* The gradient for that x, rstd * (grad * weight - normed * mean), with a row stride of its own. */
void norm_gradient(RowJob *j) {
    int64_t out_stride = j->size[0], stride = j->size[1], heads = j->size[2], dim = j->size[3];
    EACH_ROW(j)
        for (int64_t h = 0; h < heads; h++) {
            float *restrict out = (float *)j->at[0] + row * out_stride + h * dim;
            const float *restrict x = (const float *)j->at[1] + row * stride + h * dim;
            const float *restrict weight = (const float *)j->at[2] + h * dim;
            const float *restrict grad = (const float *)j->at[3] + (row * heads + h) * dim;
            float rstd = ((const float *)j->at[4])[row * heads + h], mean = ((const float *)j->at[5])[row * heads + h];
            for (int64_t i = 0; i < dim; i++) out[i] = rstd * (grad[i] * weight[i] - x[i] * rstd * mean);
        }
}

/* The rotation of qk_norm_rope undone: [rows, heads, dim]; out has a row stride. */
void rotate_back(RowJob *j) {
    int64_t out_stride = j->size[0], heads = j->size[1], dim = j->size[2], half = dim / 2;
    EACH_ROW(j)
        for (int64_t h = 0; h < heads; h++) {
            float *restrict out = (float *)j->at[0] + row * out_stride + h * dim;
            const float *restrict grad = (const float *)j->at[1] + (row * heads + h) * dim;
            const float *restrict cos = (const float *)j->at[2] + row * dim, *restrict sin = cos + half;
            for (int64_t i = 0; i < half; i++) {
                out[i] = grad[i] * cos[i] + grad[half + i] * sin[i];
                out[half + i] = grad[half + i] * cos[i] - grad[i] * sin[i];
            }
        }
}
