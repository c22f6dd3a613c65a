// An engine's server runs under a guard, with a log of its own.

package launch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// process is a command under a guard.
type process struct {
	name    string
	logPath string
	cmd     *exec.Cmd
	in      io.WriteCloser
	began   time.Time
	ended   chan struct{} // closed when nothing of it is alive
	err     error         // how it ended, when ended is closed
}

// start runs a command under a guard; its output goes to out.
func (c Config) start(name, logPath string, command, env []string, out io.Writer) (*process, error) {
	p := &process{name: name, logPath: logPath, began: time.Now(), ended: make(chan struct{})}
	argv := append(append(append([]string(nil), c.Self...), GuardCommand), command...)
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Env = append(os.Environ(), env...)
	// The process has a session of its own: a Ctrl-C at the terminal reaches only the
	// launcher, which then stops the guard.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("launch: %s: %w", name, err)
	}
	go func() { // ends with the guard
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// stopAll ends processes side by side, and returns when nothing of them is left.
func stopAll(all []*process) error {
	for _, p := range all {
		_ = p.in.Close() // the guard takes this for the order to stop
	}
	var errs []error
	late, cancel := context.WithTimeout(context.Background(), StopGrace+reapLimit+5*time.Second)
	defer cancel()
	for _, p := range all {
		select {
		case <-p.ended:
			var exit *exec.ExitError
			if errors.As(p.err, &exit) && exit.ExitCode() == guardLeft {
				errs = append(errs, fmt.Errorf("launch: not all processes of %s could be killed; the end of its log %s says which", p.name, p.logPath))
			}
			continue
		case <-late.Done():
		}
		for _, pid := range append(descendants(p.cmd.Process.Pid), p.cmd.Process.Pid) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		<-p.ended
		errs = append(errs, fmt.Errorf("launch: %s did not end by itself and was killed; its log is %s", p.name, p.logPath))
	}
	return errors.Join(errs...)
}

// died is the error of a server that has ended.
func (p *process) died() error {
	how := "without an error"
	if p.err != nil {
		how = p.err.Error()
	}
	return fmt.Errorf("launch: %s has ended (%s) after %.0f s; the end of its log %s:\n%s", p.name, how, time.Since(p.began).Seconds(), p.logPath, p.logTail(20))
}

// logTail are the last lines of the log.
func (p *process) logTail(lines int) string {
	const most = 16 << 10
	f, err := os.Open(p.logPath)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if end, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(end-most, 0), io.SeekStart)
	}
	text, _ := io.ReadAll(io.LimitReader(f, most)) // as much as there is
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return "  " + strings.Join(all[max(len(all)-lines, 0):], "\n  ")
}

// lastLogLine is the last line of the log, for the status line.
func (p *process) lastLogLine() string {
	lines := strings.Split(p.logTail(5), "\n")
	last := strings.TrimSpace(lines[len(lines)-1])
	if _, text, ok := strings.Cut(last, "] "); ok {
		last = text
	}
	if r := []rune(last); len(r) > 60 {
		last = string(r[:59]) + "…"
	}
	return last
}

// server is the process of an engine's server.
type server struct {
	*process
	url   string
	ready time.Duration // how long it took; 0 while it is not
}

// startServer runs a server with its log in the directory.
func (c Config) startServer(program []string, name, role string, port, bootstrap int, devices string) (*server, error) {
	command, env, err := engines[c.Engine].serve(&c, program, role, port, bootstrap)
	if err != nil {
		return nil, fmt.Errorf("launch: --connector-config: %w", err)
	}
	command = append(command, c.Args...)
	if devices != "" {
		env = append(env, c.DeviceVariable+"="+devices)
	}
	logPath := filepath.Join(c.LogDir, strings.ReplaceAll(name, " ", "-")+".log")
	log, err := os.Create(logPath)
	if err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	defer log.Close() // the guard has it
	fmt.Fprintf(log, "%s %s\n", strings.Join(env, " "), strings.Join(command, " "))
	p, err := c.start(name, logPath, command, env, log)
	if err != nil {
		return nil, err
	}
	return &server{process: p, url: fmt.Sprintf("http://%s:%d", localhost, port)}, nil
}

// client asks servers; nothing that launch asks is large or slow.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func ask(ctx context.Context, method, url, key string, body any, limit time.Duration) (text []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var in io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		in = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, url, in)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if text, err = io.ReadAll(io.LimitReader(resp.Body, 1<<20)); err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answered %s: %.300s", url, resp.Status, text)
	}
	return text, err
}

// warmUp sends a request of some hundred tokens. An engine's first forward pass is slow.
// On CPUs with AMX, a first pass of a single token, as at a decode server, would kill the
// engine.
func warmUp(ctx context.Context, url, model, name, key string) error {
	_, err := ask(ctx, http.MethodPost, url+"/v1/completions", key,
		map[string]any{"model": model, "prompt": strings.Repeat("warm ", 80) + name, "max_tokens": 4, "temperature": 0}, 5*time.Minute)
	return err
}
