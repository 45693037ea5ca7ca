"""The cohort as one batched computation: vmap, hand-written forms, linear chains, CUDA graphs."""
