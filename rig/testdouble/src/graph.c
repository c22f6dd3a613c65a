/* Graphs: what a capture holds, to be launched any number of times. Their nodes run in the order in which they were captured. */
#include "double.h"

#include <stdlib.h>
#include <string.h>

struct CUgraph_st {
  struct op *head;
  CUgraph next;
};
struct CUgraphExec_st {
  struct op *head;
  CUgraphExec next;
};
static CUgraph graphs;
static CUgraphExec executables;

CUgraph new_graph(struct op *head) {
  CUgraph g = calloc(1, sizeof *g);
  *g = (struct CUgraph_st){head, graphs};
  graphs = g;
  return g;
}

void free_nodes(struct op *op) {
  while (op) {
    struct op *next = op->next;
    free_op(op);
    op = next;
  }
}

void free_graphs(void) {
  while (graphs) {
    CUgraph g = graphs;
    graphs = g->next;
    free_nodes(g->head);
    free(g);
  }
  while (executables) {
    CUgraphExec e = executables;
    executables = e->next;
    free_nodes(e->head);
    free(e);
  }
}

/* A graph keeps addresses, not memory: each launch looks again at what lies there. */
static CUresult look_again(struct end *e, size_t n, bool write) {
  if (e->mem) return device_end(e->p, n, write, e);
  return e->pin ? host_end(e->at, n, e) : CUDA_SUCCESS;
}

static CUresult copy_node(const struct op *node, bool look, struct op *out) {
  *out = *node;
  out->after = NULL;
  out->afters = 0;
  out->pieces = malloc(node->count * sizeof *out->pieces);
  if (node->count) memcpy(out->pieces, node->pieces, node->count * sizeof *out->pieces);
  CUresult r = CUDA_SUCCESS;
  for (size_t i = 0; look && !r && i < out->count; i++) {
    r = look_again(&out->pieces[i].to, out->pieces[i].n, true);
    if (!r) r = look_again(&out->pieces[i].from, out->pieces[i].n, false);
  }
  return r;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
  BEGIN(UNSAFE);
  CUgraph g = graphs;
  while (g && g != graph) g = g->next;
  REQUIRE(out && g, CUDA_ERROR_INVALID_VALUE);
  (void)flags;
  CUgraphExec e = calloc(1, sizeof *e);
  struct op **tail = &e->head;
  for (const struct op *node = g->head; node; node = node->next) {
    struct op *copy = malloc(sizeof *copy);
    copy_node(node, false, copy);
    copy->next = NULL;
    *tail = copy;
    tail = &copy->next;
  }
  e->next = executables;
  executables = e;
  *out = e;
  return leave(CUDA_SUCCESS);
}

EXPORT CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
  BEGIN(CONTEXT);
  CUstream s;
  CUgraphExec e = executables;
  while (e && e != executable) e = e->next;
  REQUIRE(e, CUDA_ERROR_INVALID_VALUE);
  CUresult r = find_stream(ctx, handle, &s);
  for (const struct op *node = e->head; node && !r; node = node->next) {
    struct op op;
    r = copy_node(node, true, &op);
    if (!r) {
      r = put_op(s, &op);
      continue;
    }
    free(op.pieces);
    violation("a graph was launched whose memory is gone");
    r = CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  return leave(r);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec executable) {
  BEGIN(AFTER_ERROR);
  for (CUgraphExec *e = &executables; *e; e = &(*e)->next) {
    if (*e != executable) continue;
    *e = executable->next;
    free_nodes(executable->head);
    free(executable);
    return leave(CUDA_SUCCESS);
  }
  return leave(CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
  BEGIN(AFTER_ERROR);
  for (CUgraph *g = &graphs; *g; g = &(*g)->next) {
    if (*g != graph) continue;
    *g = graph->next;
    free_nodes(graph->head);
    free(graph);
    return leave(CUDA_SUCCESS);
  }
  return leave(CUDA_ERROR_INVALID_VALUE);
}
