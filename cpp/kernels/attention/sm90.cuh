// out = softmax(score(scale * Q * K^T), where the mask lets see) * V on Hopper's tensor cores, in one pass over K and
// V. The scheme is that of FlashAttention-3 (Shah et al., 2024).
//
//   grid             at most one block a multiprocessor. Each works through tiles of kTileM queries of one head, dealt
//                    or taken (core/tile_queue.cuh); heads that share keys are neighbours, for the L2 cache
//   few queries      of kHeads heads that share their keys are rows of one tile, a head after the other. Keys may be
//                    split: a tile then is of one split, whose float32 results attention/combine.cuh combines. kBlocks
//                    blocks of one consumer share a multiprocessor: one's softmax runs beside the other's multiplies
//   warp groups      kConsumers of 64 rows each, then one producer, of which one thread starts the copies, and one
//                    of another warp takes tiles
//
//                        producer     | Q | K[n] | K[n-1] | V[n] | K[n-2] | V[n-1] | ...         as there is room
//                        tensor cores | S[n] |        | S[n-1], P[n] V[n] |            | S[n-2], P[n-1] V[n-1] | ...
//                        arithmetic          | softmax n |           | softmax n-1 |            ...
//
//                    A consumer starts the scores of a block of keys, and the product of the weights of the block
//                    before and its values: the tensor cores work on that one while it computes the new weights. Two
//                    consumers take turns to start, so that one's softmax runs behind the other's multiplies. Behind
//                    a tile's last product come the first scores of the next tile, if its queries are there, which
//                    takes a second stage of them, or registers: they are multiplied while the results are written
//   keys             from the last block to the first. A consumer masks those that an edge of the mask cuts, of its own
//                    queries, which are peeled from the loop; blocks that no query of the tile sees are left out. A
//                    tile that sees nothing has one block, all of it masked: so each has first scores, and a product.
//                    Where a mask has a function, blocks are those of a list (attention/lists.cuh), which says of which
//                    the function is to be asked; with documents of neighbouring tokens, of none. Where Config::kSkips,
//                    a consumer lets blocks pass that no query of its own sees, and takes their turns: it has the next
//                    tile's first scores only when it has let go of them. Where Config::kHalves, it multiplies, and
//                    makes weights of, half of its first block, if its queries see no more of it: the diagonal leaves
//                    the first of two consumers so much
//   scores           a function of them (attention/strip.cuh) is given scaled products, fragment by fragment. What it
//                    loads of a block is fetched ahead of the wait for the products: a bias that is full takes kTileM
//                    x kTileN elements from the L2 cache, as many bytes as the block's keys and values at d = dv =
//                    kTileM / 2. Where TMA can, the producer brings tiles of it instead, behind the block's keys, of
//                    which a consumer reads each fragment as it is used. The kCluster blocks of a cluster have the same
//                    tile of neighbouring elements of the batch, which share an array: each loads a part of it for all
//   softmax          to the base of 2, with the scale folded into the exponent, unless there is a function. Rows' sums
//                    stay with the threads until the end. A row that sees nothing has the maximum -infinity, of which
//                    0 is subtracted: no NaNs. Sums are corrected only for a maximum that is 2^8 times as large as the
//                    one before (Dao's rule for Blackwell): after the first blocks hardly ever
//   dropout          of weights that have been summed (attention/dropout.cuh)
//   results          leave the registers in aligned pieces of 16 bytes, which the four lanes of a row exchange; those
//                    of a split in 8
//
//   barriers         full[stage]   of each of the rings of Q, K, V and tiles: 1 arrival (the producer's)
//                    empty[stage]  a lane of each consuming warp: 4 x kConsumers; of score tiles, of each block of a
//                                  cluster
//                    named 1, ...  turns, 256 threads: a consumer waits, the one before arrives
//   shared memory    | Q stages | K stages | V stages | score stages | barriers | queue of tiles |
//                    each a tile of vectors: chunks of 64 elements, of which a vector takes 128 bytes, swizzled. Of
//                    float32, which is rounded to tf32 by TMA, of 32 elements; and values are transposed before
//   registers        of a consumer's thread: kTileN / 2 for scores, kTileN / 4 for weights (kTileN / 2 of float32),
//                    kValueSize / 2 for sums of values, and what a function of scores loads. With 2 consumers there are
//                    232, or 224 with score stages, with 3 of them 160
//
// Bytes: those of Q, K, V and the results, once; for each tile again those of K and V, from the L2 cache. Flops: 2 (d +
// dv) for each query and key that it sees, of which a multiprocessor does 4096 a clock, and one exponential, of which
// it does 16. At d = dv = 64 both take as long, and at 128 the exponentials half as long: what bounds it are the tensor
// cores, if all the arithmetic is behind them. Up to 64 rows need 2 (d + dv) bytes for each key from memory, a
// multiprocessor's share of which is 18 a clock: so long as the ring hides their latency, that is what bounds them.
#pragma once

#include "attention/sm90/consumer.cuh"

namespace jaxdnn {

template <class Config>
__device__ __forceinline__ void attention_sm90(const AttentionSm90<Config>& call) {
  using Call = AttentionSm90<Config>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const AttentionBlock<Config> block(call, ptx::cvta_to_shared(shared_memory));
  constexpr unsigned kProducer = Call::kConsumers * 128;
  const bool takes = threadIdx.x == kProducer + 32 && block.scores.cluster.row == 0 && block.queue.taken();
  const unsigned taken = takes ? block.queue.take() : 0;
  if (threadIdx.x == 0) {
    block.queue.init();
    block.queries.init(4 * Call::kConsumers);
    block.keys.init(4 * Call::kConsumers);
    block.values.init(4 * Call::kConsumers);
    block.scores.init(4 * Call::kConsumers);
  }
  block.scores.open();

  const int group = ptx::shfl_sync_idx(threadIdx.x / 128);
  if (group == Call::kConsumers) {
    if constexpr (Call::kGivesRegisters) ptx::setmaxnreg_dec<Call::kProducerRegisters>();
    if (threadIdx.x == kProducer) block.load();
    if (takes) block.queue.take_others(taken);
  } else {
    if constexpr (Call::kGivesRegisters) ptx::setmaxnreg_inc<Call::kConsumerRegisters>();
    AttentionConsumer<Config>(block, group).consume();
  }
  block.scores.close();
}

}  // namespace jaxdnn
