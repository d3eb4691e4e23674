// The number that ties the library to the Python package beside it. Raise it with any change of an op, of the layout
// table or of the C interface: a library built before the change is then refused by name instead of misread.
#pragma once

#define BLOCKSPARSE_ABI 6
