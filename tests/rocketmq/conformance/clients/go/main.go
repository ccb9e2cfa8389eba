// The official Go client behind JSON lines; the protocol is described in ../client.py.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

// request is a line of the caller's; a client's own question is answered by one with Call.
type request struct {
	N         int64             `json:"n"`
	Op        string            `json:"op"`
	On        string            `json:"on"`
	As        string            `json:"as"`
	Call      int64             `json:"call"`
	Answer    string            `json:"answer"`
	Endpoints string            `json:"endpoints"`
	Ak        string            `json:"ak"`
	Sk        string            `json:"sk"`
	Tls       bool              `json:"tls"`
	Timeout   float64           `json:"timeout"`
	Topics    []string          `json:"topics"`
	Check     bool              `json:"check"`
	Group     string            `json:"group"`
	Subs      map[string]string `json:"subs"`
	Await     float64           `json:"await"`
	Topic     string            `json:"topic"`
	Body      string            `json:"body"`
	Size      int               `json:"size"`
	Tag       *string           `json:"tag"`
	Keys      []string          `json:"keys"`
	Props     map[string]string `json:"props"`
	At        int64             `json:"at"`
	Tx        string            `json:"tx"`
	Handle    string            `json:"handle"`
	Max       int32             `json:"max"`
	Invisible *float64          `json:"invisible"`
	Ref       int64             `json:"ref"`
	Seconds   float64           `json:"seconds"`
}

type record map[string]any

var (
	background = context.Background()
	output     sync.Mutex
	numbers    atomic.Int64
	things     sync.Map
	messages   sync.Map
	calls      sync.Map
)

func say(r record) {
	text, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	output.Lock()
	defer output.Unlock()
	os.Stdout.Write(append(text, '\n'))
}

func view(m *rmq.MessageView) record {
	ref := numbers.Add(1)
	messages.Store(ref, m)
	keys := slices.Clone(m.GetKeys())
	slices.Sort(keys)
	r := record{"ref": ref, "id": m.GetMessageId(), "topic": m.GetTopic(), "tag": m.GetTag(), "body": m.GetBody(), "keys": keys,
		"props": m.GetProperties(), "group": m.GetMessageGroup(), "attempt": m.GetDeliveryAttempt(), "handle": m.GetReceiptHandle()}
	if at := m.GetDeliveryTimestamp(); at != nil {
		r["at"] = at.UnixMilli()
	}
	return r
}

func ask(name, what string, m *rmq.MessageView) string {
	number, answer := numbers.Add(1), make(chan string, 1)
	calls.Store(number, answer)
	say(record{"call": number, "on": name, "what": what, "message": view(m)})
	text := <-answer
	if text == "RAISE" {
		panic("as asked")
	}
	return text
}

func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second))
}

func config(r request) *rmq.Config {
	return &rmq.Config{Endpoint: r.Endpoints, ConsumerGroup: r.Group,
		Credentials: &credentials.SessionCredentials{AccessKey: r.Ak, AccessSecret: r.Sk}}
}

func filters(r request) map[string]*rmq.FilterExpression {
	found := map[string]*rmq.FilterExpression{}
	for topic, text := range r.Subs {
		if sql, is := strings.CutPrefix(text, "SQL:"); is {
			found[topic] = rmq.NewFilterExpressionWithType(sql, rmq.SQL92)
		} else {
			found[topic] = rmq.NewFilterExpression(text)
		}
	}
	return found
}

// started starts a client, and keeps it also when that doesn't return: a producer without topics sends all the same.
func started(r request, client interface{ Start() error }, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	things.Store(r.As, client)
	done := make(chan error, 1)
	go func() { done <- client.Start() }()
	limit := 20 * time.Second
	if r.Op == "producer" && len(r.Topics) == 0 {
		limit = time.Second
	}
	select {
	case err := <-done:
		return record{"client_id": "hidden"}, err
	case <-time.After(limit):
		if limit == time.Second {
			return record{"client_id": "hidden"}, nil
		}
		return nil, fmt.Errorf("Start did not return in %v", limit)
	}
}

func producer(r request) (any, error) {
	// For all clients of the process: a check with TLS has one of its own.
	rmq.EnableSsl = r.Tls
	options := []rmq.ProducerOption{rmq.WithTopics(r.Topics...)}
	if r.Check {
		answers := map[string]rmq.TransactionResolution{"COMMIT": rmq.COMMIT, "ROLLBACK": rmq.ROLLBACK, "UNKNOWN": rmq.UNKNOWN}
		options = append(options, rmq.WithTransactionChecker(&rmq.TransactionChecker{Check: func(m *rmq.MessageView) rmq.TransactionResolution {
			return answers[ask(r.As, "check", m)]
		}}))
	}
	p, err := rmq.NewProducer(config(r), options...)
	return started(r, p, err)
}

func simple(r request) (any, error) {
	await := 5.0
	if r.Await > 0 {
		await = r.Await
	}
	s, err := rmq.NewSimpleConsumer(config(r), rmq.WithSimpleAwaitDuration(seconds(await)), rmq.WithSimpleSubscriptionExpressions(filters(r)))
	return started(r, s, err)
}

func push(r request) (any, error) {
	p, err := rmq.NewPushConsumer(config(r), rmq.WithPushSubscriptionExpressions(filters(r)),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: func(m *rmq.MessageView) rmq.ConsumerResult {
			if ask(r.As, "message", m) == "SUCCESS" {
				return rmq.SUCCESS
			}
			return rmq.FAILURE
		}}))
	return started(r, p, err)
}

func message(r request) *rmq.Message {
	m := &rmq.Message{Topic: r.Topic, Body: []byte(r.Body)}
	if r.Size > 0 {
		m.Body = []byte(strings.Repeat("x", r.Size))
	}
	if r.Tag != nil {
		m.SetTag(*r.Tag)
	}
	if len(r.Keys) > 0 {
		m.SetKeys(r.Keys...)
	}
	for name, value := range r.Props {
		m.AddProperty(name, value)
	}
	if r.Group != "" {
		m.SetMessageGroup(r.Group)
	}
	if r.At > 0 {
		m.SetDelayTimestamp(time.Unix(r.At, 0))
	}
	return m
}

func send(r request, p rmq.Producer) (any, error) {
	var receipts []*rmq.SendReceipt
	var err error
	if tx, known := things.Load(r.Tx); known {
		receipts, err = p.SendWithTransaction(background, message(r), tx.(rmq.Transaction))
	} else {
		receipts, err = p.Send(background, message(r))
	}
	if err != nil {
		return nil, err
	}
	return record{"id": receipts[0].MessageID, "tx": receipts[0].TransactionId, "recall": receipts[0].RecallHandle}, nil
}

// receive returns what came; where nothing is there, the client raises 40401.
func receive(r request, s rmq.SimpleConsumer) (any, error) {
	most, invisible := int32(16), 30.0
	if r.Max > 0 {
		most = r.Max
	}
	if r.Invisible != nil {
		invisible = *r.Invisible
	}
	found, err := s.Receive(background, most, seconds(invisible))
	if status, known := rmq.AsErrRpcStatus(err); known && status.Code == 40401 {
		err = nil
	}
	views := make([]record, 0)
	for _, each := range found {
		views = append(views, view(each))
	}
	return views, err
}

func subscribe(r request, p rmq.PushConsumer) error {
	for topic, filter := range filters(r) {
		if err := p.Subscribe(topic, filter); err != nil {
			return err
		}
	}
	return nil
}

// act carries out a request on a client or transaction that is there.
func act(r request, on any) (any, error) {
	var m *rmq.MessageView
	if found, known := messages.Load(r.Ref); known {
		m = found.(*rmq.MessageView)
	}
	switch r.Op {
	case "send":
		return send(r, on.(rmq.Producer))
	case "begin":
		things.Store(r.As, on.(rmq.Producer).BeginTransaction())
		return nil, nil
	case "commit":
		return nil, on.(rmq.Transaction).Commit()
	case "rollback":
		return nil, on.(rmq.Transaction).RollBack()
	case "recall":
		id, err := on.(rmq.Producer).Recall(background, r.Topic, r.Handle)
		return record{"id": id}, err
	case "receive":
		return receive(r, on.(rmq.SimpleConsumer))
	case "ack":
		return nil, on.(rmq.SimpleConsumer).Ack(background, m)
	case "change":
		err := on.(rmq.SimpleConsumer).ChangeInvisibleDuration(m, seconds(r.Seconds))
		return record{"handle": m.GetReceiptHandle()}, err
	case "subscribe":
		return nil, subscribe(r, on.(rmq.PushConsumer))
	case "unsubscribe":
		return nil, on.(rmq.PushConsumer).Unsubscribe(r.Topic)
	case "close":
		return nil, on.(interface{ GracefulStop() error }).GracefulStop()
	}
	return nil, errors.New(r.Op)
}

func result(r request) (any, error) {
	switch r.Op {
	case "producer":
		return producer(r)
	case "simple":
		return simple(r)
	case "push":
		return push(r)
	}
	on, known := things.Load(r.On)
	if !known {
		return nil, fmt.Errorf("no %q is there", r.On)
	}
	return act(r, on)
}

func serve(r request) {
	ok, err := result(r)
	if err == nil {
		say(record{"n": r.N, "ok": ok})
		return
	}
	failure := record{"type": fmt.Sprintf("%T", err), "code": nil, "text": err.Error()}
	if status, known := rmq.AsErrRpcStatus(err); known {
		failure["code"] = status.Code
	}
	say(record{"n": r.N, "error": failure})
}

func main() {
	rmq.EnableSsl = false
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			panic(err)
		}
		if r.Call > 0 {
			if answer, known := calls.LoadAndDelete(r.Call); known {
				answer.(chan string) <- r.Answer
			}
		} else {
			go serve(r)
		}
	}
}
