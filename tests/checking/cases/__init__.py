"""The table of cases that every transformation is tested on: adding an op adds a family, or rows to one."""

from checking.cases import attention_rows, convolution, matmul_rows, norm
from checking.cases.attention import AttentionCase as AttentionCase
from checking.cases.base import joined
from checking.cases.convolution import ConvolutionCase as ConvolutionCase
from checking.cases.dtypes import BF16 as BF16
from checking.cases.dtypes import F16 as F16
from checking.cases.dtypes import F32 as F32
from checking.cases.dtypes import F64 as F64
from checking.cases.matmul import MatmulCase as MatmulCase
from checking.cases.norm import NormCase as NormCase

TABLE = joined(norm.ROWS, matmul_rows.ROWS, attention_rows.ROWS, convolution.ROWS)
