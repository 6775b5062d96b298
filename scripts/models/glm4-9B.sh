# Made from examples/glm4-9b/model/config.json by scripts/models/generate.py.
MODEL_ARGS=(
   --num-layers 40
   --hidden-size 4096
   --ffn-hidden-size 13696
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 2
   --kv-channels 128
   --add-qkv-bias
   --position-embedding-type rope
   --rotary-base 10000
   --rotary-percent 0.5
   --rotary-interleaved
   --max-position-embeddings 32768
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-05
   --post-self-attn-layernorm
   --post-mlp-layernorm
   --swiglu
   --disable-bias-linear
)
