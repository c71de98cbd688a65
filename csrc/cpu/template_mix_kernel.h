// Weights of layers as mixtures of templates. Included once per ISA by instantiate.h.

template <typename T>
void template_mix_forward(const TemplateMixArgs<T>& args, int64_t first, int64_t columns) {
  gemm<T, Asks::kNothing>(args.rows, columns, args.templates, {args.weights, args.templates, 1}, args.bank + first,
                          args.size, args.out + first, args.size, {});
}

// A tile of the bank with its columns as rows, or the sums of a tile.
template <typename T>
int64_t template_mix_scratch(const TemplateMixArgs<T>& args) {
  return args.templates * (args.templates >= kLanes<T> ? args.tile : args.rows);
}

// Columns first .. end - 1, a tile at a time: while its gradient is in cache both gradients are computed from it.
template <typename T>
void template_mix_backward(const TemplateMixArgs<T>& args, int64_t first, int64_t end, T* grad_weights, T* scratch) {
  const int64_t rows = args.rows, templates = args.templates, size = args.size;
  for (int64_t at = first; at < end; at += args.tile) {
    const int64_t columns = std::min(args.tile, end - at);
    const T *grad = args.grad + at, *bank = args.bank + at;
    if (args.grad_bank)
      gemm<T, Asks::kNothing>(templates, columns, rows, {args.weights, 1, templates}, grad, size, args.grad_bank + at,
                              size, {});
    if (!grad_weights) continue;
    if (templates >= kLanes<T>) {
      transpose(bank, size, templates, columns, scratch, templates);
      gemm<T, Asks::kNothing>(rows, templates, columns, {grad, size, 1}, scratch, templates, grad_weights, templates,
                              {.accumulate = at > first});
    } else {  // too few for vectors of templates
      const bool add = at > first;
      dots(rows, templates, columns, grad, size, bank, size, add ? scratch : grad_weights, templates);
      for (int64_t i = 0; add && i < rows * templates; ++i) grad_weights[i] += scratch[i];
    }
  }
}
