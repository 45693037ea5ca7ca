"""The cohort as one batched computation: vmap, hand-written forms, chains of linear layers, CUDA graphs."""
