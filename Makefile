# make [lib]   the op library, blocksparse/blocksparse_ops.so
PYTHON ?= python3
BUILD ?= build
CUDA_ARCHS ?= 80 90a
NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CCACHE := $(shell command -v ccache)
LIBRARY := blocksparse/blocksparse_ops.so

TF_DIR := $(shell $(PYTHON) -c "import importlib.util as u; print(u.find_spec('tensorflow').submodule_search_locations[0])")

CXXFLAGS := -std=c++17 -O3 -fPIC -Wall -Wextra -fvisibility=hidden -DNDEBUG -Isrc -MMD -MP
TFFLAGS := -O2 -isystem $(TF_DIR)/include -D_GLIBCXX_USE_CXX11_ABI=1 -DEIGEN_MAX_ALIGN_BYTES=64
NVCCFLAGS := -std=c++17 -O3 -Isrc -Xcompiler -fPIC,-fvisibility=hidden -MMD -MP --threads 2 \
  $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
  -gencode arch=compute_$(firstword $(CUDA_ARCHS)),code=compute_$(firstword $(CUDA_ARCHS))

SOURCES := $(wildcard src/kernels/*.cc src/cpu/*.cc src/ops/*.cc)
ifneq ($(NVCC),)
SOURCES += $(wildcard src/cuda/*.cu src/cuda/*.cc src/cuda/*/*.cu)
CXXFLAGS += -DBLOCKSPARSE_CUDA=1
# nvcc may be a wrapper elsewhere: ask it where its toolkit lies.
CUDA_TOP := $(shell $(NVCC) --dryrun -x cu /dev/null -c 2>&1 | sed -n 's/^\#\$$ TOP=//p')
CUDA_LIBS := $(addprefix -L$(CUDA_TOP)/,lib64 lib) -lcudart_static -lrt -ldl -lpthread
endif
OBJECTS := $(SOURCES:%=$(BUILD)/%.o)

# Vector instructions live in files without TensorFlow headers, one file per instruction set.
%_avx2.cc.o: ISA := -mavx2 -mfma -mf16c
%_avx512.cc.o: ISA := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
%_amx.cc.o: ISA := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16

lib: $(LIBRARY)

$(LIBRARY): $(OBJECTS)
	g++ -shared -Wl,-z,defs -o $@ $^ -L$(TF_DIR) -l:libtensorflow_framework.so.2 $(CUDA_LIBS)

# The kernels alone, for callers without TensorFlow: benchmarks, sanitizers, other frameworks.
KERNELS := $(BUILD)/libblocksparse_kernels.so
kernels: $(KERNELS)
$(KERNELS): $(filter-out $(BUILD)/src/ops/%,$(OBJECTS))
	g++ -shared -Wl,-z,defs -o $@ $^ $(CUDA_LIBS) -lpthread

$(BUILD)/src/ops/%.cc.o: src/ops/%.cc
	@mkdir -p $(@D)
	$(CCACHE) g++ $(CXXFLAGS) $(TFFLAGS) -c $< -o $@
$(BUILD)/%.cc.o: %.cc
	@mkdir -p $(@D)
	$(CCACHE) g++ $(CXXFLAGS) $(ISA) -c $< -o $@
$(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(CCACHE) $(NVCC) $(NVCCFLAGS) -c $< -o $@

clean:
	rm -rf $(BUILD) $(LIBRARY)

-include $(OBJECTS:.o=.d)
.PHONY: lib kernels clean
