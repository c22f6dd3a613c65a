package verbs

import (
	"debug/elf"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
)

func TestLibraryIsMissing(t *testing.T) {
	_, err := load("libnowhere.so.1")
	var u *UnavailableError
	if !errors.As(err, &u) {
		t.Fatalf("err is %v, want an *UnavailableError", err)
	}
	if !strings.Contains(u.Reason, "libnowhere.so.1") || !strings.Contains(u.Remedy, "libibverbs1") || !strings.Contains(u.Remedy, libraryVariable) {
		t.Errorf("the error does not say what is missing and how to get it: %v", u)
	}
}

// Load's answer is of the whole process, so a child asks.
func TestLoadNamesTheLibrary(t *testing.T) {
	if os.Getenv(libraryVariable) != "" {
		_, first := Load()
		_, again := Load()
		var u *UnavailableError
		if !errors.As(first, &u) || !strings.Contains(u.Reason, "libsomewhere.so") || again != first {
			t.Errorf("Load gives %v, then %v", first, again)
		}
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := command("env", libraryVariable+"=libsomewhere.so", exe, "-test.run=^TestLoadNamesTheLibrary$"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func TestLibraryIsAnother(t *testing.T) {
	_, err := load("libc.so.6")
	var u *UnavailableError
	if !errors.As(err, &u) || !strings.Contains(u.Reason, "ibv_get_device_list") || !strings.Contains(u.Reason, "IBVERBS_1.1") {
		t.Errorf("err is %v, want an *UnavailableError with the first symbol that is missing", err)
	}
}

// The library must load where there is no libibverbs.
func TestNothingIsLinked(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(exe)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	libraries, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	symbols, err := f.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range libraries {
		if strings.Contains(l, "ibverbs") || strings.Contains(l, "libdl") {
			t.Errorf("the program needs %s", l)
		}
	}
	for _, s := range symbols {
		if strings.Contains(s.Name, "ibv_") {
			t.Errorf("the program needs the symbol %s", s.Name)
		}
	}
	if len(symbols) == 0 {
		t.Error("no symbol was found: this test sees nothing")
	}
}

func TestSpeed(t *testing.T) {
	for _, c := range []struct {
		width, code uint32
		want        uint64
	}{
		{1, 1, 2_500_000_000}, {2, 8, 40_000_000_000}, {2, 32, 100_000_000_000}, {2, 64, 200_000_000_000},
		{2, 128, 400_000_000_000}, {16, 64, 100_000_000_000}, {2, 0, 0}, {32, 32, 0},
	} {
		if got := speed(c.width, c.code); got != c.want {
			t.Errorf("speed(%d, %d) is %d, want %d", c.width, c.code, got, c.want)
		}
	}
	for s, want := range map[string]uint64{
		"200 Gb/sec (4X HDR)\n": 200e9, "2.5 Gb/sec (1X SDR)": 2_500_000_000, "": 0, "fast": 0, "1e300 Gb/sec": 0, "-1 Gb/sec": 0, "NaN Gb/sec": 0, "10 Mb/sec": 0,
	} {
		if got := parseRate(s); got != want {
			t.Errorf("parseRate(%q) is %d, want %d", s, got, want)
		}
	}
}

func TestMTU(t *testing.T) {
	for bytes, want := range map[int]uint8{0: 0, 255: 0, 256: 1, 511: 1, 1024: 3, 1500: 3, 4096: 5, 9000: 5} {
		if got := mtuCode(bytes); got != want {
			t.Errorf("mtuCode(%d) is %d, want %d", bytes, got, want)
		}
	}
	for code, want := range map[int]int{-1: 0, 0: 0, 1: 256, 5: 4096, 6: 0} {
		if got := mtuBytes(code); got != want {
			t.Errorf("mtuBytes(%d) is %d, want %d", code, got, want)
		}
	}
}

func TestRouteOutOfRange(t *testing.T) {
	ok := Route{Port: 1, MTU: 1024}
	if err := ok.check(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Route){
		"Port":           func(p *Route) { p.Port = 0 },
		"PKeyIndex":      func(p *Route) { p.PKeyIndex = 65536 },
		"RemoteQP":       func(p *Route) { p.RemoteQP = 1 << 24 },
		"RemotePSN":      func(p *Route) { p.RemotePSN = 1 << 24 },
		"LocalPSN":       func(p *Route) { p.LocalPSN = 1 << 24 },
		"SourceGIDIndex": func(p *Route) { p.SourceGIDIndex = -1 },
		"HopLimit":       func(p *Route) { p.HopLimit = 256 },
		"TrafficClass":   func(p *Route) { p.TrafficClass = 256 },
		"ServiceLevel":   func(p *Route) { p.ServiceLevel = 16 },
		"MinRNRTimer":    func(p *Route) { p.MinRNRTimer = 32 },
		"Timeout":        func(p *Route) { p.Timeout = 32 },
		"Retry":          func(p *Route) { p.Retry = 8 },
		"RNRRetry":       func(p *Route) { p.RNRRetry = 8 },
	} {
		p := ok
		change(&p)
		if err := p.check(); !errors.Is(err, syscall.EINVAL) || !strings.HasPrefix(err.Error(), name+" is ") {
			t.Errorf("%s out of its range gives %v", name, err)
		}
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		RetryExceeded.String():          "retries exceeded: the peer does not answer (status 12)",
		Status(99).String():             "unknown (status 99)",
		EventPortError.String():         "port error",
		EventGIDChange.String():         "GID change",
		EventType(77).String():          "event 77",
		PortActive.String():             "active",
		PortState(-3).String():          "state -3",
		GIDRoCEv2.String():              "RoCE v2",
		ReadyToSend.String():            "ready to send",
		LinkLayer(9).String():           "link layer 9",
		TransportIWARP.String():         "iWARP",
		EventDeviceFatal.String():       "device fatal error",
		EventClientReregisters.String(): "client reregistration",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestRegisterErrors(t *testing.T) {
	e := &RegisterError{Device: "mlx5_0", Addr: 0x7000, Length: 1 << 30, MaxSize: 1 << 40, MaxMR: 100, Open: 3, Memlock: 8 << 20, Err: syscall.ENOMEM}
	for _, want := range []string{"mlx5_0", "1073741824", "8388608", "errno 12", "ulimit -l", "CAP_IPC_LOCK"} {
		if !strings.Contains(e.Error(), want) {
			t.Errorf("%q is not in %q", want, e)
		}
	}
	e.Memlock = NoMemlockLimit
	if s := e.Error(); !strings.Contains(s, "room for 100 regions, this process has 3") || !strings.Contains(s, "unlimited") {
		t.Error(s)
	}
	e.Length = 1<<40 + 1
	if s := e.Error(); !strings.Contains(s, "at most 1099511627776 bytes; split it") {
		t.Error(s)
	}
	e = &RegisterError{MaxSize: 1 << 40, Length: 1, Err: syscall.EFAULT}
	if s := e.Error(); !strings.Contains(s, "mapped") || !errors.Is(e, syscall.EFAULT) {
		t.Error(s)
	}
	const bar1 = "is the GPU's BAR1 large enough"
	for cause, want := range map[syscall.Errno]string{syscall.ENOMEM: bar1, syscall.EIO: bar1, syscall.ENOSYS: "install a newer rdma-core", syscall.EOPNOTSUPP: "registers no dma-buf"} {
		e = &RegisterError{Device: "mlx5_0", MaxSize: 1 << 40, Length: 1 << 30, Memlock: 8 << 20, DMABuf: true, Err: cause}
		if s := e.Error(); !strings.Contains(s, want) || !strings.Contains(s, "mlx5_0") || strings.Contains(s, "memlock") {
			t.Errorf("%v: %s, want %q", cause, s, want)
		}
	}
	if e.Err = syscall.EINVAL; strings.Contains(e.Error(), bar1) {
		t.Error(e)
	}
}
