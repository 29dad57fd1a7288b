"""The unit and the launches of a product over a short K (cpp/kernels/product/short_k.cuh)."""

from jaxdnn.engines.product.problem import Product
from jaxdnn.engines.product.sm90.short_k import knobs as short_k
from jaxdnn.engines.product.sm90.unit import Unit
from jaxdnn.engines.product.tma import CHUNK, DEPTH_BYTES, SWIZZLE, tensor_map
from jaxdnn.engines.unit import Constant, Parameter, map_parameter
from jaxdnn.plan import Scalar


class ShortKUnit(Unit):
    """The text, the launches and the scratch buffers of one product."""

    kernel = "product_short_k"
    call = "ProductShortK"
    instruction = "WGMMA_RS"

    def depth(self, product: Product) -> int:
        return short_k.depth(product)

    def stage(self, product: Product) -> int:
        return short_k.stage(product, self.knobs)

    def shared_memory(self, product: Product) -> int:
        return short_k.shared_memory(product, self.knobs)

    def load_constants(self, product: Product) -> dict[str, Constant]:
        return {**super().load_constants(product), "RowElements": product.k}

    def load_parameters(self, product: Product) -> list[Parameter]:
        a, box = product.a, (CHUNK, short_k.depth(product))
        tiles = [tensor_map(b, product.batch, box, SWIZZLE[DEPTH_BYTES], multiplied=True) for b in product.b]
        found = [Parameter(f"const {a.dtype}*", "rows", "rows", a.buffer)]
        found += [map_parameter(f"b{i}", f"b[{i}]", one) for i, one in enumerate(tiles)]
        if product.batch > 1 and a.batch_stride:
            found.append(Parameter("long long", "rows_batch", "rows_batch", Scalar("int64", a.batch_stride)))
        return found
