// Multiplies (core/wgmma.cuh) of few columns, for products with a narrow side.
#pragma once

#include "core/wgmma.cuh"

namespace jaxdnn {

#define JAXDNN_TEXT_OF_8 JAXDNN_TEXT4()
#define JAXDNN_LIST_OF_8(c) JAXDNN_LIST4(c, )
#define JAXDNN_TEXT_OF_16 JAXDNN_TEXT8()
#define JAXDNN_LIST_OF_16(c) JAXDNN_LIST8(c, )
#define JAXDNN_TEXT_OF_32 JAXDNN_TEXT10() ", " JAXDNN_TEXT6(1)
#define JAXDNN_LIST_OF_32(c) JAXDNN_LIST10(c, ), JAXDNN_LIST6(c, 1)

JAXDNN_WGMMA(8, 4, 5, 6, 7, 8);
JAXDNN_WGMMA(16, 8, 9, 10, 11, 12);
JAXDNN_WGMMA(32, 16, 17, 18, 19, 20);

}  // namespace jaxdnn
