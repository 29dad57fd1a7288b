// The gradient of an image that a convolution's windows tile, side by side, on Hopper's tensor cores: also the
// transposed convolution whose stride is its window, which enlarges an image. Each place of the image meets one place
// of the output and one tap, so all is one product; but for where its results lie, product/sm90.cuh.
//
//   rows            windows: places of the output, by its channels (K)
//   columns         a window's places by the image's channels: the filter as it lies
//
//   windows of 2 x 3, in the image                    and as a matrix
//       | a a a | b b b |                             row 0   | a a a | A A A |
//       | A A A | B B B |                             row 1   | b b b | B B B |
//       | c c c | d d d |                                     a line of a window's places, and their channels, lies
//       | C C C | D D D |                                     together in both
//
// Results leave through shared memory, in pieces of up to 16 bytes of such a line. Where the filter is flipped, the
// taps of a dimension run against its places.
//
// Bytes: output, filter and image, once each; memory bounds it, or the tensor cores where both have many channels.
// Taken by phases of the stride (convolution/sm90.cuh), the output would be loaded once for each of a window's places.
#pragma once

#include "core/affine.cuh"
#include "product/sm90.cuh"

namespace jaxdnn {

/// One dimension of an image.
struct TiledDimension {
  Divisor windows, taps;  // by how many there are
  int window_count = 1, tap_count = 1;
  int window_step = 0, tap_step = 0;  // elements of the image
};

template <class Call>
struct TiledImageRows : ScatteredRows {
  const Call& call;

  __device__ __forceinline__ int operator()(int row) const { return row; }

  __device__ __forceinline__ long long offset(int row, int column, int) const {
    int tap = static_cast<int>(call.run_divisor.quotient(column));
    long long found = call.first + (column - tap * call.run);
#pragma unroll
    for (const TiledDimension& dimension : call.dimensions) {
      const int window = static_cast<int>(dimension.windows.quotient(row));
      const int next = static_cast<int>(dimension.taps.quotient(tap));
      found += static_cast<long long>(row - window * dimension.window_count) * dimension.window_step;
      found += static_cast<long long>(tap - next * dimension.tap_count) * dimension.tap_step;
      row = window;
      tap = next;
    }
    return found + row * call.image_step;
  }
};

/// Config has kDimensions, and kPieceBytes of a line of a window's places, besides what a product's has.
template <class Config>
struct ConvolutionSm90TiledImage : ProductSm90<Config> {
  using Loads = MatrixLoads<ConvolutionSm90TiledImage>;

  TiledDimension dimensions[Config::kDimensions];  // the innermost first
  int run = 0;                                     // elements that lie together in the image and in the filter
  Divisor run_divisor;
  long long first = 0;  // of the first window's first tap, in the image
  long long image_step = 0;

  __device__ __forceinline__ TiledImageRows<ConvolutionSm90TiledImage> result_rows(int) const { return {{}, *this}; }
};

template <class Config>
__device__ __forceinline__ void convolution_sm90_tiled_image(const ConvolutionSm90TiledImage<Config>& call) {
  product_sm90(call);
}

}  // namespace jaxdnn
