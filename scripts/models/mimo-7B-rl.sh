# Made from examples/mimo-7b/model/config.json by scripts/models/generate.py.
MODEL_ARGS=(
   --num-layers 36
   --hidden-size 4096
   --ffn-hidden-size 11008
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
   --position-embedding-type rope
   --rotary-base 640000
   --max-position-embeddings 32768
   --vocab-size 151680
   --untie-embeddings-and-output-weights
   --normalization RMSNorm
   --norm-epsilon 1e-05
   --swiglu
   --disable-bias-linear
)
