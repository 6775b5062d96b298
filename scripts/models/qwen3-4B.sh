# Made from examples/qwen3-4b/model/config.json by scripts/models/generate.py.
MODEL_ARGS=(
   --num-layers 36
   --hidden-size 2560
   --ffn-hidden-size 9728
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   --position-embedding-type rope
   --rotary-base 1000000
   --max-position-embeddings 40960
   --vocab-size 151936
   --normalization RMSNorm
   --norm-epsilon 1e-06
   --swiglu
   --disable-bias-linear
)
