/* Activations of a gated product, all of the form gate * sigmoid(x) * up. Semantics: ops/activation/operator.py. */
#ifndef LOCKSTEP_ACTIVATION_H
#define LOCKSTEP_ACTIVATION_H

#include "vector.h"

enum { SILU, GELU_TANH, SWIGLU_CLAMPED }; /* as in `ACTIVATIONS` */

typedef struct {
    V gate, up; /* the two factors, clamped where the activation says so */
    V x, slope; /* the sigmoid's argument, and its derivative with respect to the gate */
} Gated;

INLINE Gated gated(int64_t activation, V gate, V up) {
    const float linear = 1.5957691216057308f, cubic = 0.07135481627159843f, alpha = 1.702f, limit = 7.0f;
    if (activation == GELU_TANH) {
        V square = gate * gate;
        return (Gated){gate, up, gate * (square * cubic + linear), square * (3 * cubic) + linear};
    }
    if (activation == SWIGLU_CLAMPED) {
        gate = at_most(gate, limit), up = at_most(at_least(up, -limit), limit) + 1.0f;
        return (Gated){gate, up, gate * alpha, splat(alpha)};
    }
    return (Gated){gate, up, gate, splat(1)};
}

/* 1 where a value is within the limits to which `gated` clamps it, 0 elsewhere: the factor on its gradient. */
INLINE V gate_inside(int64_t activation, V gate) {
    return activation == SWIGLU_CLAMPED ? pick(gate <= 7.0f, splat(1), splat(0)) : splat(1);
}

INLINE V up_inside(int64_t activation, V up) {
    return gate_inside(activation, largest(up, -up));
}

#endif
