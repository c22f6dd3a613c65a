package verbs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The constants of this package that libibverbs' headers define.
var abiConstants = map[string]int64{
	"IBV_WC_SUCCESS": int64(Success), "IBV_WC_WR_FLUSH_ERR": int64(Flushed), "IBV_WC_REM_ACCESS_ERR": int64(RemoteAccess),
	"IBV_WC_LOC_PROT_ERR": int64(LocalProtection), "IBV_WC_RETRY_EXC_ERR": int64(RetryExceeded), "IBV_WC_RNR_RETRY_EXC_ERR": int64(RNRExceeded),
	"IBV_WC_FATAL_ERR": int64(Fatal),

	"IBV_WC_RDMA_WRITE": int64(OpWrite), "IBV_WC_RECV_RDMA_WITH_IMM": int64(OpReceiveImm),

	"IBV_EVENT_CQ_ERR": int64(EventQueueError), "IBV_EVENT_DEVICE_FATAL": int64(EventDeviceFatal),
	"IBV_EVENT_PORT_ACTIVE": int64(EventPortActive), "IBV_EVENT_PORT_ERR": int64(EventPortError), "IBV_EVENT_LID_CHANGE": int64(EventLIDChange),
	"IBV_EVENT_GID_CHANGE":        int64(EventGIDChange),
	"IBV_EVENT_CLIENT_REREGISTER": int64(EventClientReregisters),

	"IBV_TRANSPORT_IB": int64(TransportIB), "IBV_TRANSPORT_IWARP": int64(TransportIWARP),
	"IBV_PORT_DOWN": int64(PortDown), "IBV_PORT_INIT": int64(PortInit), "IBV_PORT_ARMED": int64(PortArmed), "IBV_PORT_ACTIVE": int64(PortActive),
	"IBV_LINK_LAYER_UNSPECIFIED": int64(LinkUnspecified), "IBV_LINK_LAYER_INFINIBAND": int64(LinkInfiniBand), "IBV_LINK_LAYER_ETHERNET": int64(LinkEthernet),
	"IBV_GID_TYPE_IB": int64(GIDInfiniBand), "IBV_GID_TYPE_ROCE_V1": int64(GIDRoCEv1), "IBV_GID_TYPE_ROCE_V2": int64(GIDRoCEv2),
	"IBV_ACCESS_LOCAL_WRITE": int64(LocalWrite), "IBV_ACCESS_REMOTE_WRITE": int64(RemoteWrite), "IBV_ACCESS_RELAXED_ORDERING": int64(RelaxedOrdering),
	"IBV_MTU_256": int64(mtuCode(256)), "IBV_MTU_4096": int64(mtuCode(4096)),
}

// TestABI holds abi.h and the constants above against libibverbs' own headers. It
// looks for them in the compiler's places, or in the folder KVCONN_VERBS_HEADERS;
// scripts/verbs-abi.sh gets them, and there a test without headers is a failure.
func TestABI(t *testing.T) {
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	flags := []string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"}
	headers := os.Getenv("KVCONN_VERBS_HEADERS")
	if headers != "" {
		flags = append(flags, "-I", headers)
	}
	compile := func(file, text string) (string, error) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(cc, append(flags, file)...).CombinedOutput()
		return string(out), err
	}
	dir := t.TempDir()
	if out, err := compile(filepath.Join(dir, "there.c"), "#include <infiniband/verbs.h>\n"); err != nil {
		if headers != "" {
			t.Fatalf("no infiniband/verbs.h in %s: %v\n%s", headers, err, out)
		}
		t.Skip("NOT RUN: abi.h was compared with nothing, since infiniband/verbs.h or a C compiler is missing; scripts/verbs-abi.sh gets the headers and runs this test")
	}
	here, err := filepath.Abs("testdata/abi.c")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	fmt.Fprintf(&text, "#include %q\n", here)
	for name, value := range abiConstants {
		fmt.Fprintf(&text, "_Static_assert((long)%s == %d, \"%s\");\n", name, value, name)
	}
	all := filepath.Join(dir, "all.c")
	if out, err := compile(all, text.String()); err != nil {
		t.Errorf("abi.h or a constant of this package is not as in libibverbs' headers: %v\n%s", err, out)
	}
	// The comparison notices a difference: one member further on, one constant more.
	abi, err := os.ReadFile("abi.h")
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range [][3]string{
		{"void (*gap1[11])(void);", "void (*gap1[12])(void);", "poll_cq: offset"},
		{"void (*gap0[38])(void);", "void (*gap0[37])(void);", "query_port: place"},
		{"uint64_t gap1[9];", "uint64_t gap1[8];", "ibv_send_wr: size"},
		{"KV_IBV_QPS_RTR = 2", "KV_IBV_QPS_RTR = 3", "IBV_QPS_RTR"},
		{"(struct kv_ibv_cq *, unsigned)", "(struct kv_ibv_cq *, int)", "ibv_ack_cq_events: signature"},
	} {
		wrong := strings.Replace(string(abi), change[0], change[1], 1)
		check, err := os.ReadFile(here)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "abi.h"), []byte(wrong), 0o666); err != nil {
			t.Fatal(err)
		}
		out, err := compile(filepath.Join(dir, "wrong.c"), strings.Replace(string(check), `"../abi.h"`, `"abi.h"`, 1))
		if wrong == string(abi) || err == nil || !strings.Contains(out, change[2]) {
			t.Errorf("%s for %s is not noticed as %q: %v\n%s", change[1], change[0], change[2], err, out)
		}
	}
}
