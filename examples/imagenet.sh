#!/bin/sh
# Train on ImageNet with Gradient-Skip: imagenet.sh DATA [options of imagenet.py]
# What is set before wins over what stands here; `. results/NAME/best.env` sets what a search has found.

# Auto: when each layer stops is found out in training. These are the published values, for 90 epochs of ImageNet.
export CAC_VAR_START_ITR="${CAC_VAR_START_ITR:-5000}"
export CAC_VAR_START_THR="${CAC_VAR_START_THR:-0.95}"
export CAC_VAR_MT_COUNT_THR="${CAC_VAR_MT_COUNT_THR:-5}"
export CAC_VAR_MT_THR="${CAC_VAR_MT_THR:-0.96}"
export CAC_VAR_SLOPE_THR="${CAC_VAR_SLOPE_THR:-0.98}"
export CAC_VAR_SAMPLES="${CAC_VAR_SAMPLES:-200}"
export CAC_BRAKING_DISTANCE="${CAC_BRAKING_DISTANCE:-300}"

# Manual: stop layers 0 to 10 at the first iteration and 11 to 20 at iteration 100. It wins over auto where it is set.
# export CAC_STOP_LAYER_NUM=10,20
# export CAC_STOP_LAYER_ITR=0,100

exec "${PYTHON:-python}" "$(dirname "$0")/imagenet.py" "$@"
